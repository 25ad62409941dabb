// Work on as many threads as XLA's pool has, in phases that start when the previous one is complete.
//
// The calling thread takes part and does all unclaimed work, so nothing waits for another thread to
// start. Each thread first works through its own range in order, which keeps its memory access a
// stream, and then helps with the other ranges.
#pragma once

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define FORGE_PAUSE() _mm_pause()
#else
#define FORGE_PAUSE()
#endif

namespace forge {

constexpr int kMaxThreads = 64;

class Phase {
  static constexpr int kSpins = 256;  // a few microseconds

 public:
  // Calls `body(context, item)` for each item below `count`.
  Phase(long count, void* context, void (*body)(void*, long), int threads)
      : count_(count), context_(context), body_(body), threads_(threads), ranges_(threads) {
    for (int t = 0; t < threads; ++t) {
      ranges_[t].next.store(count * t / threads, std::memory_order_relaxed);
      ranges_[t].end = count * (t + 1) / threads;
    }
  }

  void work(int thread) {
    long mine = 0;
    for (int i = 0; i < threads_; ++i) {
      Range& range = ranges_[(thread + i) % threads_];
      while (range.next.load(std::memory_order_relaxed) < range.end) {
        long item = range.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= range.end) break;
        body_(context_, item);
        ++mine;
      }
    }
    if (mine) done_.fetch_add(mine, std::memory_order_acq_rel);
    // If a helper has an item but no core, because another process runs there, it gets this one.
    for (int spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins) {
      if (spins < kSpins) {
        FORGE_PAUSE();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  struct alignas(64) Range {
    std::atomic<long> next;
    long end;
  };
  long count_;
  void* context_;
  void (*body_)(void*, long);
  int threads_;
  std::vector<Range> ranges_;
  alignas(64) std::atomic<long> done_{0};
};

// A list of phases. A thread that joins late finds nothing to claim, so it never accesses anything that
// has gone out of scope.
class Job {
 public:
  explicit Job(int threads) : threads_(threads) { std::fegetenv(&float_mode_); }

  template <class F>
  void add(long count, F& body) {
    auto call = [](void* context, long item) { (*static_cast<F*>(context))(item); };
    phases_.push_back(std::make_unique<Phase>(count, &body, call, threads_));
  }

  int threads() const { return threads_; }

  // Does the calling thread's part. When this returns, everything is done.
  void lead() { work(0); }

  // Does the part of thread `thread` in the leader's floating-point mode, in which XLA has subnormal
  // numbers rounded to zero.
  void help(int thread) {
    if (thread >= threads_) return;
    std::fesetenv(&float_mode_);
    work(thread);
  }

 private:
  void work(int thread) {
    for (auto& phase : phases_) phase->work(thread);
  }

  std::vector<std::unique_ptr<Phase>> phases_;
  int threads_;
  std::fenv_t float_mode_;
};

// The threads that help with jobs. They are not threads of XLA's pool, because a thread that waits for
// the next job there delays what XLA schedules.
//
// Waking a sleeping thread takes longer than most jobs do. A helper therefore stays awake for a moment
// after a job, because the next job of a step follows within microseconds. Meanwhile it yields the core
// to others, such as the host's thread. If it only spun, the kernel would treat it as busy, and others
// would wait a time slice of one or two milliseconds.
class Helpers {
 public:
  // They are never destroyed, because the threads use them until the process ends.
  static Helpers& instance() {
    static Helpers* helpers = new Helpers;
    return *helpers;
  }

  // Offers the job to all helpers that have a part in it.
  void offer(const std::shared_ptr<Job>& job) {
    lock();
    for (; started_ < job->threads(); ++started_) std::thread(&Helpers::run, this, started_).detach();
    job_ = job;
    unlock();
    offered_.fetch_add(1);
    for (int t = 1; t < job->threads(); ++t) helpers_[t].wake();
  }

 private:
  static constexpr auto kLinger = std::chrono::microseconds(1000);

  struct alignas(64) Helper {
    // Between the store here and the load in `wake`, either `wake` sees that this thread sleeps, or
    // `changed` sees the new job.
    template <class F>
    void sleep_unless(F changed) {
      std::unique_lock<std::mutex> held(mutex);
      asleep.store(true);
      if (changed()) asleep.store(false);
      woken.wait(held, [this] { return !asleep.load(); });
    }

    void wake() {
      if (!asleep.load()) return;
      std::lock_guard<std::mutex> held(mutex);
      asleep.store(false);
      woken.notify_one();
    }

    std::atomic<bool> asleep{false};
    std::mutex mutex;
    std::condition_variable woken;
  };

  void run(int thread) {
    for (long seen = 0;;) {
      long offered = offered_.load();
      if (offered == seen) {
        wait(thread, seen);
        continue;
      }
      seen = offered;
      lock();
      std::shared_ptr<Job> job = job_.lock();
      unlock();
      if (job) job->help(thread);
    }
  }

  // Returns when there is a new job for this thread, and possibly earlier.
  void wait(int thread, long seen) {
    auto changed = [&] { return offered_.load() != seen; };
    auto end = std::chrono::steady_clock::now() + kLinger;
    do {
      for (int i = 0; i < 16; ++i) {
        if (changed()) return;
        FORGE_PAUSE();
      }
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < end);
    helpers_[thread].sleep_unless(changed);
  }

  void lock() {
    while (locked_.test_and_set(std::memory_order_acquire)) FORGE_PAUSE();
  }
  void unlock() { locked_.clear(std::memory_order_release); }

  std::atomic_flag locked_ = ATOMIC_FLAG_INIT;
  int started_ = 1;  // with the leader, which is thread 0
  std::weak_ptr<Job> job_;
  alignas(64) std::atomic<long> offered_{0};
  Helper helpers_[kMaxThreads];
};

// Runs each body over its number of items, one phase after the other.
class Team {
 public:
  Team(xla::ffi::ThreadPool& pool, long most_items) {
    long threads = pool.num_threads();
    if (threads > kMaxThreads) threads = kMaxThreads;
    if (threads > most_items) threads = most_items;
    threads_ = threads < 1 ? 1 : int(threads);
  }

  int threads() const { return threads_; }

  template <class... F>
  void run(std::pair<long, F*>... phases) {
    if (threads_ == 1) {
      (run_alone(phases), ...);
      return;
    }
    auto job = std::make_shared<Job>(threads_);
    (job->add(phases.first, *phases.second), ...);
    Helpers::instance().offer(job);
    job->lead();
  }

 private:
  template <class F>
  static void run_alone(std::pair<long, F*> phase) {
    for (long i = 0; i < phase.first; ++i) (*phase.second)(i);
  }

  int threads_;
};

template <class F>
std::pair<long, F*> phase(long count, F& body) {
  return {count, &body};
}

// Returns memory of the calling thread that is valid until its next use of the same `slot` and type.
template <class T>
T* scratch(int slot, size_t count) {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffers[8];
  Buffer& buffer = buffers[slot];
  size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.data = std::aligned_alloc(64, bytes);
    buffer.size = bytes;
  }
  return static_cast<T*>(buffer.data);
}

}  // namespace forge

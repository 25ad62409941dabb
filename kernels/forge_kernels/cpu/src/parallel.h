// Work on XLA's own thread pool in phases, each of which starts when the previous one is complete.
//
// The calling thread takes part and does all unclaimed work, so nothing waits for a pool thread to
// start. Each thread first works through its own range in order, which keeps its memory access a
// stream, and then helps with the other ranges.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <thread>
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

// A list of phases and the threads that work on it.
class Job {
 public:
  template <class F>
  void add(long count, F& body, int threads) {
    auto call = [](void* context, long item) { (*static_cast<F*>(context))(item); };
    phases_.push_back(std::make_unique<Phase>(count, &body, call, threads));
    threads_ = threads;
  }

  // Does the calling thread's part. When this returns, everything is done.
  void lead() { work(0); }

  // Does another thread's part. A thread that starts late finds nothing to claim, so it never accesses
  // anything that has gone out of scope.
  void help() {
    int thread = joined_.fetch_add(1, std::memory_order_relaxed);
    if (thread < threads_) work(thread);
  }

 private:
  void work(int thread) {
    for (auto& phase : phases_) phase->work(thread);
  }

  std::vector<std::unique_ptr<Phase>> phases_;
  int threads_ = 1;
  std::atomic<int> joined_{1};
};

// The place where threads of the pool wait for the next job. Waking a sleeping thread takes longer than
// most jobs do. A thread that has finished a job therefore stays awake for a moment, because the next
// job of a step follows within microseconds. Meanwhile it yields the core to others, such as the host's
// thread. If it only spun, the kernel would treat it as busy, and others would wait a time slice of one
// or two milliseconds.
class Lobby {
 public:
  static Lobby& instance() {
    static Lobby lobby;
    return lobby;
  }

  // Announces the job to the threads that wait here, and returns how many there are.
  int publish(const std::shared_ptr<Job>& job) {
    lock();
    job_ = job;
    unlock();
    published_.fetch_add(1, std::memory_order_release);
    return waiting_.load(std::memory_order_acquire);
  }

  // Works on the job, then on jobs that follow within kLinger.
  void serve(std::shared_ptr<Job> job) {
    for (;;) {
      long seen = published_.load(std::memory_order_acquire);
      job->help();
      job.reset();
      if (!wait(seen)) return;
      lock();
      job = job_.lock();
      unlock();
      if (!job) return;
    }
  }

 private:
  static constexpr auto kLinger = std::chrono::microseconds(100);

  bool wait(long seen) {
    waiting_.fetch_add(1, std::memory_order_acq_rel);
    auto end = std::chrono::steady_clock::now() + kLinger;
    bool found = false;
    do {
      for (int i = 0; i < 16 && !found; ++i) {
        found = published_.load(std::memory_order_acquire) != seen;
        FORGE_PAUSE();
      }
      if (!found) std::this_thread::yield();
    } while (!found && std::chrono::steady_clock::now() < end);
    waiting_.fetch_sub(1, std::memory_order_acq_rel);
    return found;
  }

  void lock() {
    while (locked_.test_and_set(std::memory_order_acquire)) FORGE_PAUSE();
  }
  void unlock() { locked_.clear(std::memory_order_release); }

  std::atomic_flag locked_ = ATOMIC_FLAG_INIT;
  std::weak_ptr<Job> job_;
  std::atomic<long> published_{0};
  std::atomic<int> waiting_{0};
};

// Runs each body over its number of items, one phase after the other.
class Team {
 public:
  Team(xla::ffi::ThreadPool& pool, long most_items) : pool_(pool) {
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
    auto job = std::make_shared<Job>();
    (job->add(phases.first, *phases.second, threads_), ...);
    for (int t = 1 + Lobby::instance().publish(job); t < threads_; ++t)
      pool_.Schedule([job] { Lobby::instance().serve(job); });
    job->lead();
  }

 private:
  template <class F>
  static void run_alone(std::pair<long, F*> phase) {
    for (long i = 0; i < phase.first; ++i) (*phase.second)(i);
  }

  xla::ffi::ThreadPool& pool_;
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

// Work on XLA's own thread pool, in phases: a phase starts when the one before it is complete.
//
// The calling thread takes part, and takes what nobody else does, so nothing waits for a pool
// thread to start. Each thread has a range of its own to work through in order (its memory stream
// stays a stream) and then helps with the other ranges.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
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
 public:
  // `body(context, item)` for each item below `count`.
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
    while (done_.load(std::memory_order_acquire) < count_) FORGE_PAUSE();
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

template <class F>
Phase* make_phase(long count, F& body, int threads) {
  return new Phase(
      count, &body, [](void* context, long item) { (*static_cast<F*>(context))(item); }, threads);
}

// Runs each body over its count of items, one phase after the other.
// A thread that starts late finds nothing to claim: it never touches what has gone out of scope.
class Team {
 public:
  explicit Team(xla::ffi::ThreadPool& pool, long most_items)
      : pool_(pool) {
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
    (job->phases.emplace_back(make_phase(phases.first, *phases.second, threads_)), ...);
    for (int t = 1; t < threads_; ++t) pool_.Schedule([job, t] { job->work(t); });
    job->work(0);
  }

 private:
  struct Job {
    std::vector<std::unique_ptr<Phase>> phases;
    void work(int thread) {
      for (auto& phase : phases) phase->work(thread);
    }
  };

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

// Memory of the calling thread that lasts until its next use of the same `slot`.
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

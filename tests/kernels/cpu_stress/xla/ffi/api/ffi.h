// The member of XLA's thread pool that parallel.h uses, for any number of threads.
#pragma once

namespace xla::ffi {

class ThreadPool {
 public:
  explicit ThreadPool(long threads) : threads_(threads) {}
  long num_threads() const { return threads_; }

 private:
  long threads_;
};

}  // namespace xla::ffi

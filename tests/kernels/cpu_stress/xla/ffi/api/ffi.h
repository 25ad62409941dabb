// A thread pool with the two members of XLA's that parallel.h uses, of any number of threads.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace xla::ffi {

class ThreadPool {
 public:
  explicit ThreadPool(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
  }
  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  long num_threads() const { return long(threads_.size()); }

  template <class F>
  void Schedule(F&& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::forward<F>(task));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace xla::ffi

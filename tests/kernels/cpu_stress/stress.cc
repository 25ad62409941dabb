// Runs jobs of few and of many items, one after the other and from several callers. Each item of a
// phase must run once, the first phase before the second, and all before run() returns.
//
//     stress THREADS JOBS CALLERS
#include <cstdio>
#include <cstdlib>

#include "parallel.h"

static void run_jobs(xla::ffi::ThreadPool& pool, long jobs) {
  for (long job = 0; job < jobs; ++job) {
    long items = job % 3 ? 1 + job % 4 : 20;
    std::vector<std::atomic<int>> first(items), second(items);
    std::atomic<bool> early{false};
    auto one = [&](long i) {
      if (job % 8 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++first[i];
    };
    auto two = [&](long i) {
      for (auto& count : first) early = early || count != 1;
      ++second[i];
    };
    forge::Team(pool, items).run(forge::phase(items, one), forge::phase(items, two));
    for (long i = 0; i < items; ++i)
      if (first[i] != 1 || second[i] != 1 || early) {
        std::puts("a job was not complete");
        std::fflush(stdout);
        std::_Exit(1);
      }
  }
}

int main(int, char** arguments) {
  xla::ffi::ThreadPool pool(std::atoi(arguments[1]));
  std::vector<std::thread> callers;
  for (int i = 0; i < std::atoi(arguments[3]); ++i)
    callers.emplace_back([&] { run_jobs(pool, std::atol(arguments[2])); });
  for (auto& caller : callers) caller.join();
}

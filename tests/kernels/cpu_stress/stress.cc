// Runs jobs of few and of many items, one after the other and from several callers. Each item of a
// phase must run once, the first phase before the second, and all before run() returns. A single caller
// also runs jobs that end only if every thread takes part, in the caller's floating-point mode.
//
//     stress THREADS JOBS CALLERS
#include <cfenv>
#include <cstdio>
#include <cstdlib>

#include "parallel.h"

[[noreturn]] static void fail(const char* message) {
  std::puts(message);
  std::fflush(stdout);
  std::_Exit(1);
}

// Starts a job after a pause of random length, so that helpers are awake, asleep or on their way.
static void meet(xla::ffi::ThreadPool& pool) {
  std::this_thread::sleep_for(std::chrono::microseconds(std::rand() % 500));
  forge::Team team(pool, forge::kMaxThreads);
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  std::atomic<int> present{0};
  std::fesetround(std::rand() % 2 ? FE_UPWARD : FE_DOWNWARD);
  int mode = std::fegetround();
  auto arrive = [&](long) {
    if (std::fegetround() != mode) fail("a helper has another floating-point mode");
    for (++present; present < team.threads(); std::this_thread::yield())
      if (std::chrono::steady_clock::now() > end) fail("a helper did not take part");
  };
  team.run(forge::phase(team.threads(), arrive));
}

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
      if (first[i] != 1 || second[i] != 1 || early) fail("a job was not complete");
  }
}

int main(int, char** arguments) {
  xla::ffi::ThreadPool pool(std::atoi(arguments[1]));
  long jobs = std::atol(arguments[2]), count = std::atol(arguments[3]);
  std::vector<std::thread> callers;
  for (long i = 0; i < count; ++i) callers.emplace_back([&] { run_jobs(pool, jobs); });
  for (auto& caller : callers) caller.join();
  for (long i = 0; i < jobs && count == 1; ++i) meet(pool);
}

// Times the inner loop of bfloat16 products with the instruction set that this is compiled for.

#include <time.h>

#include "pairs.h"

namespace {

constexpr long kWords = 256;  // K = 512: a panel and its rows fit into a core's cache
alignas(64) uint16_t weights[kWords * 64];
alignas(64) uint32_t rows[kWords * forge::kPairWords * forge::kMaxRows];
alignas(64) float sums[forge::kMaxRows][2][16];

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

}  // namespace

// Returns GFLOP/s of one core over `products` products.
extern "C" double forge_probe(long products) {
  constexpr int R = forge::kMaxRows;
  for (long i = 0; i < kWords * 64; ++i) weights[i] = uint16_t(0x3f80 | (i * 37 & 0x7f));
  for (long i = 0; i < kWords * forge::kPairWords * R; ++i) rows[i] = 0x3f803f80;
  double start = now();
  for (long i = 0; i < products; ++i) {
    constexpr int J = forge::vectors_at_once(R, 1);
    for (int first = 0; first < 2; first += J) {
      forge::F16 acc[R][J];
      forge::multiply_pairs(weights + 32 * first, kWords, rows, nullptr, 0, acc);
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < J; ++j) forge::store(sums[r][first + j], acc[r][j]);
    }
    asm volatile("" : : "r"(&sums[0][0][0]) : "memory");
  }
  return 2.0 * R * 32 * 2 * kWords * double(products) / (now() - start) * 1e-9;
}

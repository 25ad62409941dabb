// The inner loop of bfloat16 products: R packed rows of x times P panels of weights.
//
// It is separate because the choice of the instruction set depends on it: `probe.cc` times it.
#pragma once

#include "simd.h"

namespace forge {

// `w` is u16[P, words, 32, 2] and `x` the packed rows, as described in linear.h. `ahead_lines` lines
// from `ahead` on are prefetched.
template <int R, int P>
FORGE_INLINE void multiply_pairs(const uint16_t* w, long words, const uint32_t* x,
                                 const char* ahead, long ahead_lines, F16 (&acc)[R][2 * P]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 2 * P; ++j) acc[r][j] = zero();
  for (long k = 0; k < words; ++k) {
    I16 v[2 * P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      v[2 * p] = load_bits(w + p * words * 64 + k * 64);
      v[2 * p + 1] = load_bits(w + p * words * 64 + k * 64 + 32);
    }
    if (ahead_lines > 0) {
#pragma GCC unroll 4
      for (int i = 0; i < 2 * P; ++i) prefetch_l2(ahead + 64 * i);
      ahead += 128 * P;
      ahead_lines -= 2 * P;
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 2 * P; ++j)
        acc[r][j] = dot2(acc[r][j], v[j], load_pair(x + kPairWords * k * R + r, R));
    }
  }
}

}  // namespace forge

// The inner loop of bfloat16 products: R packed rows of x times P panels of weights.
//
// It is separate because the choice of the instruction set depends on it: `probe.cc` times it.
#pragma once

#include "simd.h"

namespace forge {

// Multiplies by J vectors of 16 columns, from `w` on in u16[panels, words, 32, 2]. These are one or both of
// a panel, or both of two panels. `x` has the packed rows, as described in rows.h. `ahead_lines` lines
// from `ahead` on are prefetched.
template <int R, int J>
FORGE_INLINE void multiply_pairs(const uint16_t* w, long words, const uint32_t* x,
                                 const char* ahead, long ahead_lines, F16 (&acc)[R][J]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) acc[r][j] = zero();
  for (long k = 0; k < words; ++k) {
    I16 v[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) v[j] = load_bits(w + j / 2 * words * 64 + k * 64 + j % 2 * 32);
    if (ahead_lines > 0) {
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) prefetch_l2(ahead + 64 * j);
      ahead += 64 * J;
      ahead_lines -= J;
    }
    add_dot2(acc, v, [&](int r, int i) { return x[(kPairWords * k + i) * R + r]; });
  }
}

}  // namespace forge

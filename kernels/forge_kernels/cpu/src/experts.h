// A mixture of experts on packed weights: y = sum of weight * down(silu(gate(x)) * up(x)) over the
// experts that each row of x has chosen.
//
// Rows are gathered by expert; an expert multiplies those that it has, whatever their number, and
// one that has none is not read. Sums are in float32, in the order of the experts' numbers: the
// bits of a row depend on that row alone, as those of `run_linear` do.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"

namespace forge {

// So many packed matrices, one after the other.
struct Matrices {
  const void* w;
  const void* scale;  // int8: f32, int4: f16
  long N, K;

  // The fields of `op` that say which matrix it multiplies with.
  void select(Format format, long expert, Linear& op) const {
    long panels = (N + kPanel - 1) / kPanel, groups = (K + kGroup - 1) / kGroup;
    op.w = static_cast<const char*>(w) + expert * panels * panel_bytes_of(format, K);
    op.scale = static_cast<const float*>(scale) + expert * panels * kPanel;
    op.scale16 = static_cast<const uint16_t*>(scale) + expert * groups * panels * kPanel;
    op.N = N;
    op.K = op.x_stride = K;
  }
};

struct Experts {
  const uint16_t* x;  // bf16[rows, d]
  Matrices gate_up;   // [E, 2 inner, d], packed as pairs
  Matrices down;      // [E, d, inner]
  const int32_t* chosen;  // [rows, per_token]
  const float* weights;   // [rows, per_token]
  uint16_t* y;            // bf16[rows, d]
  long rows, per_token, count;
};

template <Format format>
void run_experts(xla::ffi::ThreadPool& pool, const Experts& op) {
  if (op.rows <= 0) return;
  long d = op.down.N, inner = op.down.K, places = op.rows * op.per_token;
  auto in_range = [&](int32_t expert) { return expert >= 0 && expert < op.count; };

  // Sorted by expert, and among equals by row: begin[e] is where the rows of expert e start.
  int32_t* begin = scratch<int32_t>(5, op.count + 1 + places);
  int32_t* rows = begin + op.count + 1;
  float* sum = scratch<float>(6, op.rows * d + places);
  float* weights = sum + op.rows * d;
  std::fill(begin, begin + op.count + 1, 0);
  for (long p = 0; p < places; ++p)
    if (in_range(op.chosen[p])) ++begin[op.chosen[p] + 1];
  long most = 0;
  for (long e = 0; e < op.count; ++e) {
    most = std::max<long>(most, begin[e + 1]);
    begin[e + 1] += begin[e];
  }
  for (long p = 0; p < places; ++p) {  // afterwards begin[e] is where those of expert e end
    if (!in_range(op.chosen[p])) continue;
    long at = begin[op.chosen[p]]++;
    rows[at] = int32_t(p / op.per_token);
    weights[at] = op.weights[p];
  }
  std::memset(sum, 0, op.rows * d * sizeof(float));
  uint16_t* middle = scratch<uint16_t>(7, most * inner);

  for (long e = 0, first = 0; e < op.count; first = begin[e++]) {
    if (begin[e] == first) continue;
    Linear up{}, down{};
    op.gate_up.select(format, e, up);
    up.x = op.x;
    up.from = rows + first;
    up.y16 = middle;
    up.epilogue = Epilogue::kSwiGLU;
    op.down.select(format, e, down);
    down.x = middle;
    down.y32 = sum;
    down.to = rows + first;
    down.weight = weights + first;
    down.epilogue = Epilogue::kAddWeighted;
    up.rows = down.rows = begin[e] - first;
    run_linear<format>(pool, up);
    run_linear<format>(pool, down);
  }

  constexpr long kRows = 16;  // of an item
  auto round = [&](long item) {
    for (long r = item * kRows; r < std::min(op.rows, (item + 1) * kRows); ++r) {
      const float* from = sum + r * d;
      uint16_t* to = op.y + r * d;
      long i = 0;
      for (; i + 16 <= d; i += 16) store_bf16(to + i, load(from + i));
      for (; i < d; ++i) to[i] = f32_to_bf16(from[i]);
    }
  };
  long items = (op.rows + kRows - 1) / kRows;
  Team(pool, items).run(phase(items, round));
}

}  // namespace forge

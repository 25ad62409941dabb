// A mixture of experts on packed weights: y = sum of weight * down(silu(gate(x)) * up(x)) over each
// row's chosen experts.
//
// Rows are gathered by expert. An expert multiplies its rows, however many, and an expert without rows
// is not read. Sums are in float32, in the order of the experts' numbers. The bits of a row depend on
// that row only, as in `run_linear`.
//
// All experts share four phases, so that threads synchronize four times and not at every expert. The
// phases are packing rows of x, multiplying by gate and up, packing again, and multiplying by down. In
// the last phase, an item is a panel of columns of all experts, one after the other.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear.h"

namespace forge {

// Several packed matrices, one after the other.
struct Matrices {
  const void* w;
  const void* scale;  // int8: f32, int4: f16
  long N, K;
  Blocks blocks;  // if `w` is in blocks

  // Sets the fields of `op` that select the matrix of an expert.
  void select(Format format, long expert, Linear& op) const {
    long panels = (N + kPanel - 1) / kPanel, groups = (K + kGroup - 1) / kGroup;
    op.w = static_cast<const char*>(w) + expert * panels * panel_bytes_of(format, K, blocks);
    op.blocks = blocks;
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
  const int32_t* order;   // [E, d], the column of x for each column of gate_up; or null
  uint16_t* y;            // bf16[rows, d]
  long rows, per_token, count;
  long shape;  // rows of x, not all of which are in use: see `uses_tiles`
};

// An expert that has rows, with its two products.
struct Part {
  Linear up, down;
  PackedRows packed;  // rows of x, then of the output of gate and up
  Tiles tiles;
  long first_tile;
};

// Multiplies all tiles of a part by `count` panels from `panel` on; `ahead` is prefetched.
template <Format format>
void multiply_part(const Part& part, const Linear& op, long panel, long count, Ahead ahead) {
  long step = op.rows <= kMaxRowsWide && !op.in_tiles ? count : 1;
  if (format == Format::kInt4) step = 1;
  for (long p = panel; p < panel + count; p += step) {
    long left = (panel + count - p) / step, share = (ahead.lines + left - 1) / left;
    multiply_panel<format>(op, part.packed, part.tiles, 0, part.tiles.count, p, int(step),
                           ahead.take(share));
  }
}

// In blocks, gate and up may have other value types than down; rows are packed in the same way.
template <Format format, Format down_format = format>
void run_experts(xla::ffi::ThreadPool& pool, const Experts& op) {
  static_assert(format == down_format || (in_blocks(format) && in_blocks(down_format)));
  if (op.rows <= 0) return;
  long d = op.down.N, inner = op.down.K, places = op.rows * op.per_token;
  auto in_range = [&](int32_t expert) { return expert >= 0 && expert < op.count; };

  // Sorted by expert, then by row: begin[e] is where the rows of expert e start.
  int32_t* begin = scratch<int32_t>(5, op.count + 1 + places);
  int32_t* rows = begin + op.count + 1;
  float* sum = scratch<float>(6, op.rows * d + places);
  float* weights = sum + op.rows * d;
  std::fill(begin, begin + op.count + 1, 0);
  for (long p = 0; p < places; ++p)
    if (in_range(op.chosen[p])) ++begin[op.chosen[p] + 1];
  for (long e = 0; e < op.count; ++e) begin[e + 1] += begin[e];
  for (long p = 0; p < places; ++p) {  // afterwards, begin[e] is the end of the rows of expert e
    if (!in_range(op.chosen[p])) continue;
    long at = begin[op.chosen[p]]++;
    rows[at] = int32_t(p / op.per_token);
    weights[at] = op.weights[p];
  }

  auto row_words = [&](long K) {
    return std::max(row_words_of(format, K, false), row_words_of(format, K, true));
  };
  long words = std::max(row_words(d), row_words(inner));
  long groups = format == Format::kInt4 ? (std::max(d, inner) + kGroup - 1) / kGroup : 1;
  uint32_t* packed_words = scratch<uint32_t>(2, places * words);
  float* packed_scales = scratch<float>(3, places);
  int32_t* packed_sums = scratch<int32_t>(4, places * groups);
  uint16_t* middle = scratch<uint16_t>(7, places * inner);  // bf16[places, inner]
  std::vector<Part> parts;
  std::vector<long> part_of_tile;
  for (long e = 0, first = 0; e < op.count; first = begin[e++]) {
    if (begin[e] == first) continue;
    Linear up{}, down{};
    op.gate_up.select(format, e, up);
    up.x = op.x;
    up.from = rows + first;
    up.order = op.order ? op.order + e * d : nullptr;
    up.y16 = middle + first * inner;
    up.epilogue = Epilogue::kSwiGLU;
    op.down.select(down_format, e, down);
    down.x = up.y16;
    down.y32 = sum;
    down.to = rows + first;
    down.weight = weights + first;
    down.epilogue = Epilogue::kAddWeighted;
    up.rows = down.rows = begin[e] - first;
    up.in_tiles = down.in_tiles = uses_tiles(format, op.shape, up.rows);
    PackedRows packed{packed_words + first * words, packed_scales + first,
                      packed_sums + first * groups};
    Tiles tiles = tiles_of(format, up);
    parts.push_back({up, down, packed, tiles, long(part_of_tile.size())});
    part_of_tile.insert(part_of_tile.end(), tiles.count, long(parts.size()) - 1);
  }

  long num_parts = long(parts.size()), num_tiles = long(part_of_tile.size());
  auto panels_of = [](const Matrices& m) { return (m.N + kPanel - 1) / kPanel; };
  long up_panels = panels_of(op.gate_up), down_panels = panels_of(op.down);
  Team team(pool, std::max({num_tiles, num_parts * up_panels, down_panels}));
  // Two panels at a time give more independent sums. Few panels would divide badly.
  auto together = [&](long panels, long items) {
    return panels % 2 == 0 && items >= 16L * team.threads() ? 2L : 1L;
  };
  long up_step = together(up_panels, num_parts * up_panels);
  long down_step = together(down_panels, down_panels);
  long units = up_panels / up_step;
  long up_bytes = panel_bytes_of(format, d, op.gate_up.blocks);
  long down_bytes = panel_bytes_of(down_format, inner, op.down.blocks);

  auto pack = [&](long tile, bool second) {
    const Part& part = parts[part_of_tile[tile]];
    PackedRows packed = part.packed;
    pack_tile(second ? part.down : part.up, format, part.tiles, tile - part.first_tile, packed);
  };
  auto pack_x = [&](long tile) { pack(tile, false); };
  auto pack_middle = [&](long tile) { pack(tile, true); };
  auto panel_at = [](const Linear& op, long panel, long bytes) {
    return static_cast<const char*>(op.w) + panel * bytes;
  };
  auto multiply_up = [&](long item) {
    const Part& part = parts[item / units];
    long next = item + 1, lines = next < num_parts * units ? up_step * up_bytes / 64 : 0;
    const Part& then = lines ? parts[next / units] : part;
    multiply_part<format>(part, part.up, item % units * up_step, up_step,
                          {panel_at(then.up, next % units * up_step, up_bytes), lines});
  };
  auto multiply_down = [&](long item) {
    long panel = item * down_step, column = panel * kPanel;
    long columns = std::min(down_step * kPanel, d - column);
    for (long r = 0; r < op.rows; ++r) std::fill_n(sum + r * d + column, columns, 0.0f);
    for (long i = 0; i < num_parts; ++i) {
      long lines = i + 1 < num_parts ? down_step * down_bytes / 64 : 0;
      const Part& then = lines ? parts[i + 1] : parts[i];
      multiply_part<down_format>(parts[i], parts[i].down, panel, down_step,
                                 {panel_at(then.down, panel, down_bytes), lines});
    }
    for (long r = 0; r < op.rows; ++r) {
      const float* from = sum + r * d + column;
      uint16_t* to = op.y + r * d + column;
      long i = 0;
      for (; i + 16 <= columns; i += 16) store_bf16(to + i, load(from + i));
      for (; i < columns; ++i) to[i] = f32_to_bf16(from[i]);
    }
  };
  team.run(phase(num_tiles, pack_x), phase(num_parts * units, multiply_up),
           phase(num_tiles, pack_middle), phase(down_panels / down_step, multiply_down));
}

}  // namespace forge

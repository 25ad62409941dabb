// Low-rank adapters: y = (x A^T) B^T, with the adapter of each row.
//
// Adapters are packed like bfloat16 weights (formats.h), one after the other. Rows are gathered by
// adapter, so a row costs one adapter, and a row without one only zeros. The product with A is rounded
// to bfloat16. The bits of a row depend on that row and the shape of x, as in linear.h.
#pragma once

#include <vector>

#include "linear.h"

namespace forge {

struct Lora {
  const uint16_t* x;      // bf16[shape, K]
  const uint8_t* a;       // [places] packed [rank, K]
  const uint8_t* b;       // [places] packed [N, rank]
  const int32_t* place;   // i32[shape], from 1; others mean none
  uint16_t* y;            // bf16[shape, N]
  long rows, shape;       // rows of x in use, and all
  long K, N, rank, places;
};

inline void run_lora(xla::ffi::ThreadPool& pool, const Lora& op) {
  constexpr Format kFormat = Format::kBf16;
  auto panels_of = [](long columns) { return (columns + kPanel - 1) / kPanel; };
  long a_bytes = panels_of(op.rank) * panel_bytes_of(kFormat, op.K, {});
  long panels = panels_of(op.N), b_bytes = panels * panel_bytes_of(kFormat, op.rank, {});
  auto place_of = [&](long row) {
    long place = row < op.rows ? op.place[row] : 0;
    return place >= 0 && place <= op.places ? place : 0;
  };

  // Sorted by place, then by row: begin[p] is where the rows of place p start.
  int32_t* begin = scratch<int32_t>(5, op.places + 2 + op.shape);
  int32_t* rows = begin + op.places + 2;
  std::fill(begin, begin + op.places + 2, 0);
  for (long r = 0; r < op.shape; ++r) ++begin[place_of(r) + 1];
  for (long p = 0; p <= op.places; ++p) begin[p + 1] += begin[p];
  long without = begin[1], used = op.shape - without;
  for (long r = 0; r < op.shape; ++r) rows[begin[place_of(r)]++] = int32_t(r);
  // Now begin[p] is the end of the rows of place p.

  auto row_words = [](long K) {
    return std::max(row_words_of(kFormat, K, false), row_words_of(kFormat, K, true));
  };
  uint32_t* x_words = scratch<uint32_t>(2, used * (row_words(op.K) + row_words(op.rank)));
  uint32_t* middle_words = x_words + used * row_words(op.K);
  uint16_t* middle = scratch<uint16_t>(7, used * op.rank);
  struct Part {
    Linear up, down;
    PackedRows x, middle;
    Tiles tiles;
    long first_tile;
  };
  std::vector<Part> parts;
  std::vector<long> part_of_tile;
  for (long p = 1; p <= op.places; ++p) {
    long first = begin[p - 1], count = begin[p] - first, at = first - without;
    if (count == 0) continue;
    Linear up{}, down{};
    up.x = op.x;
    up.x_stride = op.K;
    up.from = rows + first;
    up.w = op.a + (p - 1) * a_bytes;
    up.K = op.K;
    up.N = down.K = down.x_stride = op.rank;
    up.y16 = middle + at * op.rank;
    down.x = up.y16;
    down.w = op.b + (p - 1) * b_bytes;
    down.N = op.N;
    down.y16 = op.y;
    down.to = rows + first;
    up.rows = down.rows = count;
    up.in_tiles = down.in_tiles = uses_tiles(kFormat, op.shape, count);
    Tiles tiles = tiles_of(kFormat, up);
    PackedRows x{}, inner{};
    x.words = x_words + at * row_words(op.K);
    inner.words = middle_words + at * row_words(op.rank);
    parts.push_back({up, down, x, inner, tiles, long(part_of_tile.size())});
    part_of_tile.insert(part_of_tile.end(), tiles.count, long(parts.size()) - 1);
  }

  constexpr long kRows = 64, kPanels = 8;  // per item
  long tiles = long(part_of_tile.size()), zeros = (without + kRows - 1) / kRows;
  long units = (panels + kPanels - 1) / kPanels, items = long(parts.size()) * units;
  auto multiply_up = [&](long item) {
    if (item >= tiles) {
      long first = (item - tiles) * kRows, last = std::min(first + kRows, without);
      for (long r = first; r < last; ++r) std::fill_n(op.y + rows[r] * op.N, op.N, uint16_t(0));
      return;
    }
    Part part = parts[part_of_tile[item]];
    long tile = item - part.first_tile;
    pack_tile(part.up, kFormat, part.tiles, tile, part.x);
    for (long panel = 0; panel < panels_of(op.rank); ++panel)
      multiply_panel<kFormat>(part.up, part.x, part.tiles, tile, tile + 1, panel, 1, {nullptr, 0});
    pack_tile(part.down, kFormat, part.tiles, tile, part.middle);
  };
  auto multiply_down = [&](long item) {
    const Part& part = parts[item / units];
    long first = item % units * kPanels, last = std::min(first + kPanels, panels);
    for (long panel = first; panel < last; ++panel)
      multiply_panel<kFormat>(part.down, part.middle, part.tiles, 0, part.tiles.count, panel, 1,
                              {nullptr, 0});
  };
  Team team(pool, std::max(tiles + zeros, items));
  team.run(phase(tiles + zeros, multiply_up), phase(items, multiply_down));
}

}  // namespace forge

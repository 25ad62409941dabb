// y = epilogue(norm(x) W^T) with packed weights (formats.h).
//
// Blocks are multiplied as bfloat16, or as integers with rows of x that are rounded to int8 (rounded.h).
//
// Every element of y is one chain of sums over k, in order. The number of rows, their place and the
// number of threads do not matter: the bits of a row depend on that row only.
//
// On CPUs with AMX, products are made in tiles (tiles.h) from some number of rows on. Tiles of bfloat16
// sum in another order. For bfloat16 and exact blocks, the number is therefore of rows of x, not of rows
// in use, so that an executable has one path. A row's bits then depend on that row and the shape of x.
// Tiles of integers give the same bits.
#pragma once

#include "in_tiles.h"
#include "products.h"
#include "rounded.h"
#include "rows.h"

namespace forge {

using TileFunction = void (*)(const Linear&, const PackedRows&, const uint32_t*, long, long, Ahead);

template <Format format, int R, int P>
constexpr TileFunction tile_function() {
  if constexpr (format == Format::kBf16) return tile_bf16<R, P>;
  if constexpr (format == Format::kInt8) return tile_int8<R, P>;
  if constexpr (format == Format::kInt4) return tile_int4<R, 1>;
  if constexpr (has_exact_blocks(format)) {
    return tile_blocks<format, R, P>;
#if defined(FORGE_PAIR_WORDS)
  } else if constexpr (has_pair_words(format)) {
    return tile_pairs<format, R>;
#endif
  } else if constexpr (has_rounded_rows(format)) {
    return tile_rounded<format, R>;
  }
}

template <Format format, int P, size_t... R>
TileFunction pick(long rows, std::index_sequence<R...>) {
  static constexpr TileFunction functions[] = {tile_function<format, int(R) + 1, P>()...};
  return functions[rows - 1];
}

constexpr int kMaxRowsInt4 = kMaxRowsInt8 < 6 ? kMaxRowsInt8 : 6;
constexpr int kMaxRowsInBlocks = kMaxRowsAtOnce < 12 ? 3 : 12;  // values also need registers
constexpr int kMaxRowsUnpacked = kMaxRowsAtOnce < 12 ? kMaxRows : 12;

// The most rows of a tile that is multiplied by packed weights.
constexpr int max_rows(Format format) {
  if (has_pair_words(format)) return kMaxRowsInt8;
  if (in_blocks(format)) return kMaxRowsInBlocks;
  if (format == Format::kBf16) return kMaxRows;
  return format == Format::kInt4 ? kMaxRowsInt4 : kMaxRowsInt8;
}

// A few rows are multiplied by blocks together, so that the weight is read once. For more rows, panels
// of blocks are unpacked.
constexpr bool may_unpack(Format format) { return in_blocks(format) && !has_pair_words(format); }
inline bool unpacks(Format format, long rows) {
  return may_unpack(format) && rows > max_rows(format);
}

inline long tile_rows(Format format, long rows, const Blocks& blocks) {
  if (!unpacks(format, rows)) return max_rows(format);
  return has_rounded_rows(format) ? max_unpacked_rows(int(kGroup / blocks.group)) : kMaxRowsUnpacked;
}

inline Tiles tiles_of(Format format, const Linear& op) {
  if (op.in_tiles) return Tiles::of(op.rows, kTileRowsTogether);
  return Tiles(op.rows, tile_rows(format, op.rows, op.blocks));
}

template <Format format, size_t... R>
TileFunction pick_unpacked(long rows, std::index_sequence<R...>) {
  static constexpr TileFunction functions[] = {tile_unpacked<format, int(R) + 1>...};
  return functions[rows - 1];
}

template <Format format>
TileFunction pick(long rows, int panels) {
  if constexpr (sums_by_group(format)) {
    return pick<format, 1>(rows, std::make_index_sequence<max_rows(format)>());
  } else {
    return panels == 2 ? pick<format, 2>(rows, std::make_index_sequence<kMaxRowsWide>())
                       : pick<format, 1>(rows, std::make_index_sequence<max_rows(format)>());
  }
}

// ---- the whole --------------------------------------------------------------------------------

// Multiplies the tiles from `first` to `last` by a panel, or by two if `wide` is 2. `choose` returns
// the function for a number of rows.
template <Format format, class Choose>
void multiply_tiles(const Linear& op, const PackedRows& packed, const Tiles& tiles, long first,
                    long last, long panel, Ahead ahead, Choose choose) {
  long words = row_words_of(format, op.K, false);
  for (long tile = first; tile < last; ++tile) {
    long row = tile * tiles.rows, rows = std::min(tiles.rows, op.rows - row);
    long left = last - tile, share = (ahead.lines + left - 1) / left;
    choose(rows)(op, packed, packed.words + row * words, row, panel, ahead.take(share));
  }
}

template <Format format>
void multiply_tiles(const Linear& op, const PackedRows& packed, const Tiles& tiles, long first,
                    long last, long panel, int wide, Ahead ahead) {
  multiply_tiles<format>(op, packed, tiles, first, last, panel, ahead,
                         [wide](long rows) { return pick<format>(rows, wide); });
}

// Multiplies tiles by a panel of blocks that is converted first: to bfloat16, or for rounded rows to
// words that need no shuffling.
template <Format format>
void multiply_unpacked(const Linear& op, const PackedRows& packed, const Tiles& tiles, long first,
                       long last, long panel, Ahead ahead) {
  Linear other = op;
  if constexpr (has_rounded_rows(format)) {
    uint8_t* unpacked = scratch<uint8_t>(2, unpacked_bytes(op));
    auto unpack = op.blocks.group == kGroup ? unpack_rounded<format, 8, false>
                                            : unpack_rounded<format, 4, false>;
    unpack(op, panel, unpacked);
    other.w = unpacked;
    multiply_tiles<format>(other, packed, tiles, first, last, panel, ahead, [](long rows) {
      return pick_unpacked<format>(rows, std::make_index_sequence<max_unpacked_rows(1)>());
    });
  } else {
    uint16_t* unpacked = scratch<uint16_t>(2, words_of(format, op.K) * 64);
    unpack_panel<format>(op, panel, unpacked);
    other.w = unpacked;
    other.first_panel = panel;
    multiply_tiles<Format::kBf16>(other, packed, tiles, first, last, panel, 1, ahead);
  }
}

// Multiplies tiles by a panel, or by two if `wide` is 2.
template <Format format>
void multiply_panel(const Linear& op, const PackedRows& packed, const Tiles& tiles, long first,
                    long last, long panel, int wide, Ahead ahead) {
  if (op.in_tiles) {
    if constexpr (sums_by_group(format)) {
      multiply_groups_in_tiles<format>(op, packed, tiles, first, last, panel, ahead);
    } else {
      multiply_in_tiles<format>(op, packed, tiles, first, last, panel, ahead);
    }
    return;
  }
  if constexpr (may_unpack(format)) {
    if (unpacks(format, op.rows)) {
      multiply_unpacked<format>(op, packed, tiles, first, last, panel, ahead);
      return;
    }
  }
  multiply_tiles<format>(op, packed, tiles, first, last, panel, wide, ahead);
}

// Returns memory of the calling thread for all rows of x.
template <Format format>
PackedRows packed_rows_of(const Linear& op) {
  long words = row_words_of(format, op.K, op.in_tiles);
  long sums = PackedRows::sums_of(format, op.K, op.blocks);
  PackedRows packed;
  packed.words = scratch<uint32_t>(2, op.rows * words);
  packed.scales = scratch<float>(3, op.rows * PackedRows::scales_of(format, op.K));
  packed.sums = scratch<int32_t>(4, op.rows * sums);
  packed.minima = scratch<float>(4, has_rounded_rows(format) && op.blocks.minima ? op.rows * sums : 0);
  return packed;
}

// Two panels at a time give more independent sums. Few panels would divide badly among threads.
template <Format format>
int panels_together(const Linear& op, long panels, long threads) {
  bool few_rows = !sums_by_group(format) && !op.in_tiles && op.rows <= kMaxRowsWide;
  return few_rows && panels % 2 == 0 && panels >= 64L * threads ? 2 : 1;
}

template <Format format>
void run_linear(xla::ffi::ThreadPool& pool, const Linear& op) {
  if (op.rows <= 0) return;
  long panels = (op.N + kPanel - 1) / kPanel;
  Tiles tiles = tiles_of(format, op);
  int wide = panels_together<format>(op, panels, pool.num_threads());
  long panel_bytes = panel_bytes_of(format, op.K, op.blocks);
  PackedRows packed = packed_rows_of<format>(op);

  // Many rows are also split into groups of tiles, so that every thread has work.
  Team team(pool, std::max(panels / wide, tiles.count));
  long units = panels / wide, row_groups = 1;
  while (row_groups * 2 <= tiles.count / 4 && units * row_groups < 8L * team.threads())
    row_groups *= 2;
  long group_tiles = (tiles.count + row_groups - 1) / row_groups;
  row_groups = (tiles.count + group_tiles - 1) / group_tiles;

  auto pack = [&](long tile) { pack_tile(op, format, tiles, tile, packed); };
  auto multiply = [&](long item) {
    long unit = item % units, group = item / units, panel = unit * wide;
    long first = group * group_tiles, last = std::min(tiles.count, first + group_tiles);
    // The next panel is prefetched while this one is multiplied.
    const char* ahead = static_cast<const char*>(op.w) + (panel + wide) * panel_bytes;
    long lines = panel + wide < panels ? wide * panel_bytes / 64 : 0;
    multiply_panel<format>(op, packed, tiles, first, last, panel, wide, {ahead, lines});
  };
  if (tiles.count == 1) {  // a few rows: packed before the other threads are woken
    pack(0);
    team.run(phase(units, multiply));
  } else {
    team.run(phase(tiles.count, pack), phase(units * row_groups, multiply));
  }
}

// Does the same in the calling thread only.
template <Format format>
void run_linear_alone(const Linear& op) {
  long panels = (op.N + kPanel - 1) / kPanel, panel_bytes = panel_bytes_of(format, op.K, op.blocks);
  Tiles tiles = tiles_of(format, op);
  int wide = panels_together<format>(op, panels, 1);
  PackedRows packed = packed_rows_of<format>(op);
  for (long tile = 0; tile < tiles.count; ++tile) pack_tile(op, format, tiles, tile, packed);
  for (long panel = 0; panel < panels; panel += wide) {
    const char* ahead = static_cast<const char*>(op.w) + (panel + wide) * panel_bytes;
    long lines = panel + wide < panels ? wide * panel_bytes / 64 : 0;
    multiply_panel<format>(op, packed, tiles, 0, tiles.count, panel, wide, {ahead, lines});
  }
}

// These are in rounded.cc, which compiles in parallel with the rest.
extern template void run_linear_alone<Format::kRounded4>(const Linear&);
extern template void run_linear<Format::kRounded8>(xla::ffi::ThreadPool&, const Linear&);
extern template void run_linear<Format::kRounded6>(xla::ffi::ThreadPool&, const Linear&);
extern template void run_linear<Format::kRounded4>(xla::ffi::ThreadPool&, const Linear&);
extern template void run_linear<Format::kRoundedIq4>(xla::ffi::ThreadPool&, const Linear&);

}  // namespace forge

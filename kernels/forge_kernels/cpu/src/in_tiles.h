// Products in AMX tiles (tiles.h), with the formats of row products.
#pragma once

#include "products.h"
#include "rounded.h"
#include "tiles.h"

namespace forge {

// The product of the rows of tiles from `first` to `last`, without weights.
inline TileProduct tile_product(const Linear& op, Format format, const PackedRows& packed,
                                const Tiles& tiles, long first, long last, Ahead ahead) {
  long row = first * tiles.rows;
  TileProduct product{};
  product.x = packed.words + row * row_words_of(format, op.K, true);
  product.rows = std::min(last * tiles.rows, op.rows) - row;
  product.words = tile_words_of(format, op.K);
  product.ahead = ahead.at;
  product.ahead_lines = ahead.lines;
  return product;
}

// Multiplies the rows of tiles from `first` to `last` by a panel, with AMX.
template <Format format>
void multiply_in_tiles(const Linear& op, const PackedRows& packed, const Tiles& tiles, long first,
                       long last, long panel, Ahead ahead) {
  struct Context {
    const Linear& op;
    const PackedRows& packed;
    long row, panel;
  };
  Context context{op, packed, first * tiles.rows, panel};
  TileProduct product = tile_product(op, format, packed, tiles, first, last, ahead);
  product.w = panel_of(op, format, panel);
  if constexpr (in_blocks(format)) {
    uint16_t* unpacked = scratch<uint16_t>(2, words_of(format, op.K) * 64);
    unpack_panel<format>(op, panel, unpacked);
    product.w = reinterpret_cast<const uint8_t*>(unpacked);
  }
  product.context = &context;
  product.write = [](void* context, long row, long rows, long, const void* sums) {
    const Context& c = *static_cast<const Context*>(context);
    const char* at = static_cast<const char*>(sums);
    for (long r = c.row + row; r < c.row + row + rows; ++r, at += 4 * kPanel) {
      if constexpr (format == Format::kInt8) {
        write_int8(c.op, c.packed, r, c.panel, 128, load_bits(at), load_bits(at + 64));
      } else {
        const float* y = reinterpret_cast<const float*>(at);
        write_panel(c.op, r, c.panel, load(y), load(y + 16));
      }
    }
  };
  if constexpr (format == Format::kInt8) {
    multiply_tiles_u8(product);
  } else {
    multiply_tiles_bf16(product);
  }
}

// Unpacks a panel like `unpack_rounded` for tiles.
inline void unpack_int4(const Linear& op, long panel, uint8_t* out) {
  long groups = PackedRows::groups_of(op.K), columns = (op.N + kPanel - 1) / kPanel * kPanel;
  const uint8_t* w = panel_of(op, Format::kInt4, panel);
  const uint16_t* scale = op.scale16 + panel * kPanel;
  float* factors = reinterpret_cast<float*>(out + groups * kGroup * kPanel);
  I16 offset = bsplat(8);
  for (long g = 0; g < groups; ++g, w += 512, out += 1024, scale += columns, factors += kPanel) {
    for (int i = 0; i < 8; ++i) {  // half of a word, and of the fourth word after it
      I16 both = load_bits(w + 64 * i);
      store_bits(out + 64 * i, bsub(low_nibbles(both), offset));
      store_bits(out + 512 + 64 * i, bsub(high_nibbles(both), offset));
    }
    for (int j = 0; j < 2; ++j) store(factors + 16 * j, load_f16(scale + 16 * j));
  }
}

// Up to 32 rows, which are multiplied by an unpacked panel in tiles, with sums by group.
template <Format format, int words, bool minima>
class GroupsInTiles {
  static constexpr int kTogether = kGroup / (4 * words);  // groups per scale of x
  static constexpr long kGroups = kTileWords / words;     // groups per step
  using GroupSums = int32_t[kTileRowsTogether][2][16];
  static_assert(kGroups <= kTileGroups);

  const Linear& op_;
  const PackedRows& packed_;
  long first_row_, panel_;
  const float* factors_;  // [groups, 2 or 4, 16]
  alignas(64) float y_[kTileRowsTogether][2][16];

 public:
  GroupsInTiles(const Linear& op, const PackedRows& packed, long first_row, long panel)
      : op_(op), packed_(packed), first_row_(first_row), panel_(panel) {}

  void multiply(TileProduct product) {
    long values = product.words * 4 * kPanel, factors = groups() * (minima ? 256 : 128);
    uint8_t* unpacked = scratch<uint8_t>(2, values + factors);
    if constexpr (format == Format::kInt4) {
      unpack_int4(op_, panel_, unpacked);
    } else {
      unpack_rounded<format, words, true>(op_, panel_, unpacked);
    }
    factors_ = reinterpret_cast<const float*>(unpacked + values);
    product.w = unpacked;
    product.group = words;
    product.context = this;
    product.write = [](void* self, long row, long rows, long step, const void* sums) {
      static_cast<GroupsInTiles*>(self)->add_step(row, rows, step,
                                                  static_cast<const GroupSums*>(sums));
    };
    multiply_tiles_s8(product);
  }

 private:
  long groups() const { return (op_.K + 4 * words - 1) / (4 * words); }

  void add_step(long row, long rows, long step, const GroupSums* sums) {
    constexpr long kRows = kMaxRowsAtOnce < 12 ? 1 : 4;
    long all = this->groups(), group = step * kGroups, groups = std::min(kGroups, all - group);
    if (step == 0) std::memset(y_, 0, rows * sizeof y_[0]);
    row += first_row_;  // the first of a tile
    long r = 0;
    for (; r + kRows <= rows; r += kRows) add<kRows>(row, rows, r, group, groups, sums);
    for (; r < rows; ++r) add<1>(row, rows, r, group, groups, sums);
    if (group + groups < all) return;
    if constexpr (format == Format::kInt4) {
      write_int4(op_, packed_, row, rows, panel_, y_);
    } else {
      write_rounded<format, false>(op_, row, rows, panel_, y_);
    }
  }

  // Adds groups to R rows from number `r` of a tile on, in the order of `tile_int4` and `RoundedRows`.
  template <int R>
  FORGE_INLINE void add(long row, long rows, long r, long group, long groups,
                        const GroupSums* sums) {
    const float* scales = packed_.scales + row * PackedRows::groups_of(op_.K) + r;
    const float* minimum = packed_.minima + row * this->groups() + r;
    F16 y[R][2];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) y[i][j] = load(y_[r + i][j]);
    for (long g = 0; g < groups; g += kTogether) {
      F16 t[R][2];
#pragma GCC unroll 2
      for (int same = 0; same < kTogether; ++same) {
        if (same && g + same >= groups) break;
        const float* factors = factors_ + (group + g + same) * (minima ? 64 : 32);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) {
            F16 whole = to_float(load_bits(sums[g + same][r + i][j])), scale = load(factors + 16 * j);
            if constexpr (format == Format::kInt4) {
              y[i][j] = fma(whole, scale, y[i][j]);
              continue;
            }
            t[i][j] = same ? fma(whole, scale, t[i][j]) : mul(whole, scale);
            if constexpr (minima)
              y[i][j] = fma(load(factors + 32 + 16 * j),
                            splat(minimum[(group + g + same) * rows + i]), y[i][j]);
          }
      }
#pragma GCC unroll 4
      for (int i = 0; i < R && format != Format::kInt4; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j)
          y[i][j] = fma(t[i][j], splat(scales[(group + g) / kTogether * rows + i]), y[i][j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) store(y_[r + i][j], y[i][j]);
  }
};

template <Format format>
void multiply_groups_in_tiles(const Linear& op, const PackedRows& packed, const Tiles& tiles,
                              long first, long last, long panel, Ahead ahead) {
  TileProduct product = tile_product(op, format, packed, tiles, first, last, ahead);
  auto multiply = [&](auto words, auto minima) {
    GroupsInTiles<format, words, minima>(op, packed, first * tiles.rows, panel).multiply(product);
  };
  using Wide = std::integral_constant<int, kGroup / 4>;
  using Narrow = std::integral_constant<int, kGroup / 8>;
  if constexpr (is_iq4(format) || format == Format::kInt4) {
    multiply(Wide(), std::false_type());
  } else if (op.blocks.group == kGroup) {
    op.blocks.minima ? multiply(Wide(), std::true_type()) : multiply(Wide(), std::false_type());
  } else {
    op.blocks.minima ? multiply(Narrow(), std::true_type()) : multiply(Narrow(), std::false_type());
  }
}

}  // namespace forge

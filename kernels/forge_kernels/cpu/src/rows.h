// Rows of x, packed for products, and rows of y.
//
// Rows of x are packed in tiles of a few rows (`tile_rows`), so that a tile is a stream. A tile has words
// of 2 bfloat16 or 4 int8, [K/2 or K/4, rows]. If FMAs multiply bfloat16, it is float32, [K, rows].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "parallel.h"
#include "simd.h"
#include "tiles.h"

namespace forge {

enum class Epilogue { kStore = 0, kResidual = 1, kSwiGLU = 2, kAddWeighted = 3 };

struct Linear {
  const uint16_t* x;     // bf16[rows, K]
  const uint16_t* norm;  // bf16[K], or null
  float eps;
  const void* w;
  const float* scale;       // int8: f32[N]
  const uint16_t* scale16;  // int4: f16[K / 32, N rounded up]
  const uint16_t* residual;  // bf16[rows, N], or null
  uint16_t* y16;             // bf16[rows, N], or null
  float* y32;                // f32[rows, N], or null
  long rows, K, N;           // N: columns of W
  long x_stride;
  Epilogue epilogue;
  Blocks blocks{};                 // if `w` is in blocks
  long first_panel = 0;            // first panel of a bfloat16 `w`
  const int32_t* from = nullptr;   // the row of x for each row, or null if in order
  const int32_t* to = nullptr;     // the row of y
  const int32_t* order = nullptr;  // [K], the column of x for each column, or null if in order
  const float* weight = nullptr;   // f32[rows], the factor of each row that kAddWeighted adds to y32
  bool in_tiles = false;           // computed with AMX tiles: see `tiles_from`

  const uint16_t* x_row(long row) const { return x + (from ? from[row] : row) * x_stride; }
};

// The division of rows into tiles, as evenly as possible.
struct Tiles {
  long count, rows;
  explicit Tiles(long total, long most) {
    count = (total + most - 1) / most;
    rows = (total + count - 1) / count;
    count = (total + rows - 1) / rows;
  }
  // Tiles of `rows` rows each, and the rest in the last.
  static Tiles of(long total, long rows) {
    Tiles tiles(total, rows);
    tiles.rows = rows;
    tiles.count = (total + rows - 1) / rows;
    return tiles;
  }
};

// ---- packing of x ---------------------------------------------------------------------------

// Reads a row of x as float32, normalized if there is a norm. `out` has room for K rounded up to 32.
inline void read_row(const Linear& op, long row, float* out) {
  const uint16_t* x = op.x_row(row);
  long K = op.K, K16 = K / 16 * 16;
  if (op.order) {  // without a norm
    for (long k = 0; k < K; ++k) out[k] = bf16_to_f32(x[op.order[k]]);
  } else if (!op.norm) {
    for (long k = 0; k < K16; k += 16) store(out + k, load_bf16(x + k));
    for (long k = K16; k < K; ++k) out[k] = bf16_to_f32(x[k]);
  } else {
    F16 squares = zero();
    for (long k = 0; k < K16; k += 16) {
      F16 v = load_bf16(x + k);
      store(out + k, v);
      squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (long k = K16; k < K; ++k) {
      out[k] = bf16_to_f32(x[k]);
      total = std::fma(out[k], out[k], total);
    }
    float scale = 1.0f / std::sqrt(total / float(K) + op.eps);
    // Rounded where the plain form rounds: the quotient, then its product with the weight.
    alignas(64) uint16_t rounded[16];
    for (long k = 0; k < K16; k += 16) {
      store_bf16(rounded, mul(load(out + k), splat(scale)));
      store_bf16(rounded, mul(load_bf16(rounded), load_bf16(op.norm + k)));
      store(out + k, load_bf16(rounded));
    }
    for (long k = K16; k < K; ++k) {
      float quotient = bf16_to_f32(f32_to_bf16(out[k] * scale));
      out[k] = bf16_to_f32(f32_to_bf16(quotient * bf16_to_f32(op.norm[k])));
    }
  }
  for (long k = K; k < (K + 31) / 32 * 32; ++k) out[k] = 0.0f;
}

// The number of words in a row of x in tiles, before it is padded.
inline long tile_words_of(Format format, long K) {
  return has_rounded_rows(format) ? K / 4 : words_of(format, K);
}

// The number of 4-byte words in a packed row of x.
inline long row_words_of(Format format, long K, bool in_tiles) {
  if (in_tiles) return (tile_words_of(format, K) + kTileWords - 1) / kTileWords * kTileWords;
  return words_of(format, K) * (has_plain_rows(format) ? kPairWords : 1);
}

// The numbers of rows from which tiles are used, for bfloat16, int8 and sums by group.
constexpr long kNoTiles = 1L << 62;
inline long tiles_from[3] = {kNoTiles, kNoTiles, kNoTiles};

// `shape` is the number of rows of x, of which `rows` are in use.
inline bool uses_tiles(Format format, long shape, long rows) {
  if (has_plain_rows(format)) return shape >= tiles_from[0];
  return rows >= tiles_from[sums_by_group(format) ? 2 : 1];
}

inline const uint8_t* panel_of(const Linear& op, Format format, long panel) {
  return static_cast<const uint8_t*>(op.w) + panel * panel_bytes_of(format, op.K, op.blocks);
}

struct PackedRows {
  uint32_t* words;  // [tiles][row_words_of][rows of the tile], or as in tiles.h
  float* scales;    // int8 and int4: [rows]. Rounded: [tiles][K / 32][rows of the tile]
  int32_t* sums;    // int8: [rows]. int4: [tiles][K / 32][rows]. Rounded: [tiles][groups][rows]
  float* minima;    // rounded, with minima: like `sums`

  // The number of scales, and of sums, per row of x.
  static long scales_of(Format format, long K) { return has_rounded_rows(format) ? groups_of(K) : 1; }
  static long sums_of(Format format, long K, const Blocks& blocks) {
    if (has_rounded_rows(format)) return K / blocks.group;
    return format == Format::kInt4 ? groups_of(K) : 1;
  }
  static long groups_of(long K) { return (K + kGroup - 1) / kGroup; }
};

inline void quantize_row(const float* x, long K32, int8_t* out, float* scale) {
  F16 largest = zero();
  for (long k = 0; k < K32; k += 16) largest = max(largest, abs(load(x + k)));
  float top = maximum(largest);
  *scale = top / 127.0f;
  F16 inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
  for (long k = 0; k < K32; k += 16) store_s8(out + k, to_int(mul(load(x + k), inverse)));
}

// True if values of 4 bits are summed in int16. With their offset, each sum of 32 products fits.
constexpr bool sums_are_short(Format format) { return has_pair_words(format) && bits_of(format) == 4; }

// The offset of stored values, for which integer sums of products must be corrected.
constexpr int offset_of(Format format, const Blocks& blocks) {
  if (!is_unsigned(format)) return kSignedBias;
  return blocks.minima && !sums_are_short(format) ? 0 : 1 << (bits_of(format) - 1);
}

// Rounds a row to int8 with a scale per 32 values, which maps the largest to 127. If all values are
// below 1e-30, they become 0. For each group of the weights' blocks, it also returns the initial value
// of the sums. If there are minima, it returns their factor, which is the sum of the row's values in
// the group. Consecutive results are `stride` apart.
inline void round_groups(const float* x, const Linear& op, Format format, int8_t* out, float* scales,
                         int32_t* starts, float* minima, long stride) {
  long K32 = PackedRows::groups_of(op.K) * kGroup, groups = op.K / op.blocks.group;
  int32_t offset = -offset_of(format, op.blocks);
  for (long k = 0; k < K32; k += kGroup) {
    F16 first = load(x + k), second = load(x + k + 16);
    float top = maximum(max(abs(first), abs(second)));
    F16 inverse = splat(top > 1e-30f ? 127.0f / top : 0.0f);
    I16 low = to_int(mul(first, inverse)), high = to_int(mul(second, inverse));
    store_s8(out + k, low);
    store_s8(out + k + 16, high);
    // max() drops NaN; a sum keeps it.
    float scale = top / 127.0f + sum(fma(first, zero(), mul(second, zero())));
    scales[k / kGroup * stride] = scale;
    int32_t sums[2] = {isum(low), isum(high)};
    if (op.blocks.group == kGroup) sums[0] += sums[1];
    for (long i = 0, g = k / op.blocks.group; i < kGroup / op.blocks.group && g < groups; ++i, ++g) {
      starts[g * stride] = offset * sums[i];
      if (op.blocks.minima) minima[g * stride] = scale * float(sums[i]);
    }
  }
}

// Copies a row of words to its place in the tiles of AMX, padded with zeros.
inline void put_in_tile(uint16_t* row, long words, long number, long rows, uint32_t* out) {
  long steps = (words + kTileWords - 1) / kTileWords, upper = number / kTileRows * kTileRows;
  std::memset(row + 2 * words, 0, (steps * kTileWords - words) * 4);
  long together = std::min(kTileRows, rows - upper);
  out += upper * steps * kTileWords + (number - upper) * kTileWords;
  for (long s = 0; s < steps; ++s)
    std::memcpy(out + s * together * kTileWords, row + 2 * s * kTileWords, 4 * kTileWords);
}

// Packs the rows of one tile. A row that is not finite gets a scale that is not, so that its products
// are not finite either.
inline void pack_tile(const Linear& op, Format format, const Tiles& tiles, long tile,
                      PackedRows& packed) {
  long first = tile * tiles.rows, rows = std::min(tiles.rows, op.rows - first);
  long words = op.in_tiles ? tile_words_of(format, op.K) : words_of(format, op.K);
  long K32 = (op.K + 31) / 32 * 32;
  uint32_t* out = packed.words + first * row_words_of(format, op.K, op.in_tiles);
  float* row = scratch<float>(0, K32);
  uint16_t* narrow = scratch<uint16_t>(1, K32 * 2);
  int8_t* bytes = reinterpret_cast<int8_t*>(narrow);
  for (long r = 0; r < rows; ++r) {
    if (has_plain_rows(format) && !op.norm && !op.order && op.K % 2 == 0) {
      if (op.in_tiles) {
        std::memcpy(narrow, op.x_row(first + r), op.K * 2);
        put_in_tile(narrow, words, r, rows, out);
        continue;
      }
      const uint16_t* x = op.x_row(first + r);
      for (long k = 0; k < words; ++k) {
        uint32_t pair;
        std::memcpy(&pair, x + 2 * k, 4);
        store_pair(out + kPairWords * k * rows + r, rows, pair);
      }
      continue;
    }
    read_row(op, first + r, row);
    const void* source = narrow;
    if (has_rounded_rows(format)) {
      long groups = op.K / op.blocks.group;
      round_groups(row, op, format, bytes, packed.scales + first * (K32 / kGroup) + r,
                   packed.sums + first * groups + r, packed.minima + first * groups + r, rows);
    } else if (has_plain_rows(format)) {
      for (long k = 0; k < K32; k += 16) store_bf16(narrow + k, load(row + k));
    } else {
      float top = 0.0f;
      quantize_row(row, K32, bytes, &top);
      // max() drops NaN; a sum keeps it.
      F16 check = zero();
      for (long k = 0; k < K32; k += 16) check = fma(load(row + k), zero(), check);
      packed.scales[first + r] = top + sum(check);
      if (format == Format::kInt8) {
        int32_t total = 0;
        for (long k = 0; k < K32; ++k) total += bytes[k];
        packed.sums[first + r] = total;
      } else {
        int32_t* sums = packed.sums + first * (K32 / kGroup);
        for (long g = 0; g < K32 / kGroup; ++g) {
          int32_t total = 0;
          for (int k = 0; k < kGroup; ++k) total += bytes[g * kGroup + k];
          sums[g * rows + r] = total;
        }
      }
    }
    if (op.in_tiles) {
      put_in_tile(narrow, words, r, rows, out);
      continue;
    }
#if defined(FORGE_PAIR_WORDS)
    if (has_pair_words(format)) {
      source = row;
      make_pairs(bytes, K32, bits_of(format), row);
    }
#endif
    for (long k = 0; k < words; ++k) {
      uint32_t word;
      std::memcpy(&word, static_cast<const char*>(source) + 4 * k, 4);
      if (has_plain_rows(format)) {
        store_pair(out + kPairWords * k * rows + r, rows, word);
      } else {
        out[k * rows + r] = word;
      }
    }
  }
}

// ---- the end of a tile ----------------------------------------------------------------------

// Writes 16 columns of one row; `columns` of them exist.
inline void write16(const Linear& op, long row, long column, long columns, long stride, F16 v) {
  long at = (op.to ? op.to[row] : row) * stride + column;
  if (columns >= 16) {
    if (op.epilogue == Epilogue::kResidual) v = add(v, load_bf16(op.residual + at));
    if (op.epilogue == Epilogue::kAddWeighted) v = fma(v, splat(op.weight[row]), load(op.y32 + at));
    if (op.y32) {
      store(op.y32 + at, v);
    } else {
      store_bf16(op.y16 + at, v);
    }
    return;
  }
  alignas(64) float lanes[16];
  store(lanes, v);
  for (long i = 0; i < columns; ++i) {
    float x = lanes[i];
    if (op.epilogue == Epilogue::kResidual) x += bf16_to_f32(op.residual[at + i]);
    if (op.epilogue == Epilogue::kAddWeighted) x = std::fma(x, op.weight[row], op.y32[at + i]);
    if (op.y32) {
      op.y32[at + i] = x;
    } else {
      op.y16[at + i] = f32_to_bf16(x);
    }
  }
}

inline void write_panel(const Linear& op, long row, long panel, F16 first, F16 second) {
  if (op.epilogue == Epilogue::kSwiGLU) {  // 16 gates, then their 16 ups
    long width = op.N / 2;
    write16(op, row, panel * 16, width - panel * 16, width,
            mul(mul(first, sigmoid(first)), second));
    return;
  }
  long column = panel * kPanel;
  write16(op, row, column, op.N - column, op.N, first);
  if (column + 16 < op.N) write16(op, row, column + 16, op.N - column - 16, op.N, second);
}

// Writes the integer sums of a row and a panel of int8 values plus `bias`.
inline void write_int8(const Linear& op, const PackedRows& packed, long row, long panel, int bias,
                       I16 first, I16 second) {
  I16 offset = isplat(bias * packed.sums[row]);
  F16 row_scale = splat(packed.scales[row]);
  const float* scale = op.scale + panel * kPanel;
  write_panel(op, row, panel, mul(to_float(isub(first, offset)), mul(row_scale, load(scale))),
              mul(to_float(isub(second, offset)), mul(row_scale, load(scale + 16))));
}

// Writes rows of int4 products, before they are scaled.
inline void write_int4(const Linear& op, const PackedRows& packed, long row, long rows, long panel,
                       const float (*out)[2][16]) {
  for (long r = 0; r < rows; ++r) {
    F16 row_scale = splat(packed.scales[row + r]);
    write_panel(op, row + r, panel, mul(load(out[r][0]), row_scale),
                mul(load(out[r][1]), row_scale));
  }
}

// Memory that a tile prefetches into the L2 cache, in lines.
struct Ahead {
  const char* at;
  long lines;

  FORGE_INLINE void read() {
    if (lines-- <= 0) return;
    prefetch_l2(at);
    at += 64;
  }
  // Returns at most `most` lines, which the caller prefetches.
  Ahead take(long most) {
    Ahead taken{at, std::min(lines, most)};
    at += 64 * most;
    lines -= most;
    return taken;
  }
};

}  // namespace forge

// y = epilogue(norm(x) W^T): products with packed weights, bfloat16, int8, int4, or blocks.
//
// Weights are packed in panels of 32 columns, so that a panel is one stream of memory:
//   bf16  u16[N/32, K/2, 32, 2]
//   int8  u8 [N/32, K/4, 32, 4]  value + 128, and f32[N] scales
//   int4  u8 [N/32, K/32, 8, 64] two values + 8 per byte, and f16[K/32, N] scales (groups of 32)
//   blocks u8[N/32, K/size, bytes] of `size` values of 32 columns, as in GGUF's types (`Blocks`)
//
// N is padded to 32, and K to 2, 4 and 32, with zeros.
//
// Values of blocks become the bfloat16 numbers of the first format, in registers. They are multiplied
// in the same order, so the results have the same bits. Alternatively, they are multiplied as integers
// with rows of x that are rounded to int8.
//
// Rows of x are packed in tiles of a few rows (`tile_rows`), so that a tile is a stream. A tile has words
// of 2 bfloat16 or 4 int8, [K/2 or K/4, rows]. If FMAs multiply bfloat16, it is float32, [K, rows].
//
// Every element of y is one chain of sums over k, in order. The number of rows, their place and the
// number of threads do not matter: the bits of a row depend on that row only.
//
// On CPUs with AMX, products are made in tiles (tiles.h) from some number of rows on. Tiles of bfloat16
// sum in another order. For bfloat16 and exact blocks, the number is therefore of rows of x, not of rows
// in use, so that an executable has one path. A row's bits then depend on that row and the shape of x.
// Tiles of integers give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pairs.h"
#include "parallel.h"
#include "simd.h"
#include "tiles.h"

namespace forge {

// The last four have the blocks of the previous four, with rows of x rounded to int8.
enum class Format {
  kBf16 = 0,
  kInt8 = 1,
  kInt4 = 2,
  kBlocks8 = 3,
  kBlocks6 = 4,
  kBlocks4 = 5,
  kBlocksIq4 = 6,
  kRounded8 = 7,
  kRounded6 = 8,
  kRounded4 = 9,
  kRoundedIq4 = 10
};
enum class Epilogue { kStore = 0, kResidual = 1, kSwiGLU = 2, kAddWeighted = 3 };
constexpr int kPanel = 32;
constexpr int kGroup = 32;  // columns per int4 group, and per rounded group of a row of x

constexpr bool has_rounded_rows(Format format) {
  return format == Format::kRounded8 || format == Format::kRounded6 ||
         format == Format::kRounded4 || format == Format::kRoundedIq4;
}
constexpr bool has_exact_blocks(Format format) {
  return format == Format::kBlocks8 || format == Format::kBlocks6 || format == Format::kBlocks4 ||
         format == Format::kBlocksIq4;
}
constexpr bool in_blocks(Format format) {
  return has_exact_blocks(format) || has_rounded_rows(format);
}
// True if the 4 bits of a value are its index in `kIq4Values`.
constexpr bool is_iq4(Format format) {
  return format == Format::kBlocksIq4 || format == Format::kRoundedIq4;
}
// The bits of a value in a block.
constexpr int bits_of(Format format) {
  if (format == Format::kBlocks6 || format == Format::kRounded6) return 6;
  return format == Format::kBlocks4 || format == Format::kRounded4 || is_iq4(format) ? 4 : 8;
}
// True if values in a block have an offset or minima, and are not negative.
constexpr bool is_unsigned(Format format) { return bits_of(format) < 8 && !is_iq4(format); }

// True if a group has its own sums, so that only one panel is multiplied at a time.
constexpr bool sums_by_group(Format format) {
  return format == Format::kInt4 || has_rounded_rows(format);
}

// True if a word of a row has two values. They are int16 for weights of 8 bits, and two times the same
// int8 for weights of 4 bits. Other words of rounded rows have four values of int8.
constexpr bool has_pair_words([[maybe_unused]] Format format) {
#if defined(FORGE_PAIR_WORDS)
  return format == Format::kRounded8 || format == Format::kRounded4;
#else
  return false;
#endif
}

// The contents of a block of 32 columns, in this order:
//   f16[32]               a factor
//   f16[32]               the minima's factor, if minima
//   s8[size / group, 32]  the groups' scales, if two levels: a scale is the factor times this
//   s8[size / group, 32]  the same for the minima
//   s8[size / 2, 32, 2]   the values of 8 bits, or
//   u8[size / 2, 2, 16]   the values of 4 bits, two per byte, or
//   size / 16 times       the values of 6 bits:
//     u8[8, 2, 16]        their low 4 bits, like values of 4 bits
//     u8[4, 2, 16]        their high 2 bits, four per byte
// The low bits of a byte of 4-bit values have 8 columns, with each two that are consecutive in k. The
// high bits have the next 8 columns. A byte of high 2 bits (crumbs) belongs to two such bytes, which are
// consecutive in k. The first byte's values have the crumbs at bits 0 and 4, and the second byte's
// values at bits 2 and 6.
// A value is value * scale + minimum. Without minima, a value of 4 or 6 bits is (value - 8) * scale or
// (value - 32) * scale. IQ4 blocks have no minima, and a value is kIq4Values[value] * scale.
struct Blocks {
  long size = 0, group = 0;
  bool minima = false;

  bool two_levels() const { return group < size; }
  long groups() const { return size / group; }
  // The offset of the values in a block.
  long values() const { return (minima ? 2 : 1) * kPanel * (2 + (two_levels() ? groups() : 0)); }
  long bytes(Format format) const {
    return values() + size * kPanel * bits_of(format) / 8;
  }
  long panel_bytes(Format format, long K) const { return K / size * bytes(format); }
};

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

// True if rows of x are multiplied as bfloat16.
constexpr bool has_plain_rows(Format format) {
  return format == Format::kBf16 || has_exact_blocks(format);
}

inline long words_of(Format format, long K) {
  if (has_plain_rows(format)) return (K + 1) / 2;
  if (format == Format::kInt8) return (K + 3) / 4;
  return (K + kGroup - 1) / kGroup * (has_pair_words(format) ? kGroup / 2 : kGroup / 4);
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

// The bytes of one panel of w.
inline long panel_bytes_of(Format format, long K, const Blocks& blocks) {
  if (in_blocks(format)) return blocks.panel_bytes(format, K);
  return format == Format::kInt4 ? (K + kGroup - 1) / kGroup * 512 : words_of(format, K) * 128;
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

// ---- tiles: R rows times P panels -------------------------------------------------------------

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

template <int R, int P>
void tile_bf16(const Linear& op, const PackedRows& packed, const uint32_t* x, long row, long panel,
               Ahead ahead) {
  constexpr int J = vectors_at_once(R, P);
  long words = (op.K + 1) / 2;
  const uint16_t* w = static_cast<const uint16_t*>(op.w) + (panel - op.first_panel) * words * 64;
  alignas(64) float out[R][2 * P][16];
  for (int first = 0; first < 2 * P; first += J) {
    F16 acc[R][J];
    Ahead mine = ahead.take(J * words);
    multiply_pairs(w + 32 * first, words, x, mine.at, mine.lines, acc);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) store(out[r][first + j], acc[r][j]);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      write_panel(op, row + r, panel + p, load(out[r][2 * p]), load(out[r][2 * p + 1]));
}

template <int R, int P>
void tile_int8(const Linear& op, const PackedRows& packed, const uint32_t* x, long row, long panel,
               Ahead ahead) {
  constexpr int J = vectors_at_once(R, P);
  long words = (op.K + 3) / 4;
  const uint8_t* panels = static_cast<const uint8_t*>(op.w) + panel * words * 128;
  alignas(64) int32_t out[R][2 * P][16];
  for (int first = 0; first < 2 * P; first += J) {
    const uint8_t* w = panels + 64 * first;
    I16 acc[R][J];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) acc[r][j] = izero();
    Ahead mine = ahead.take(J * words);
    for (long k = 0; k < words; ++k) {
      I16 v[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j)
        v[j] = packed_words(load_bits(w + j / 2 * words * 128 + k * 128 + j % 2 * 64));
      if (mine.lines > 0) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) prefetch_l2(mine.at + 64 * j);
        mine.at += 64 * J;
        mine.lines -= J;
      }
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) acc[r][j] = dot4(acc[r][j], v[j], x[k * R + r]);
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) store_bits(out[r][first + j], acc[r][j]);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      write_int8(op, packed, row + r, panel + p, kPackedBias, load_bits(out[r][2 * p]),
                 load_bits(out[r][2 * p + 1]));
}

template <int R, int P>
void tile_int4(const Linear& op, const PackedRows& packed, const uint32_t* x, long row, long panel,
               Ahead ahead) {
  static_assert(P == 1);
  constexpr int J = vectors_at_once(R, 1);
  long groups = (op.K + kGroup - 1) / kGroup;
  long columns = (op.N + kPanel - 1) / kPanel * kPanel;
  const int32_t* sums = packed.sums + row * groups;
  alignas(64) float out[R][2][16];
  for (int first = 0; first < 2; first += J) {
    const uint8_t* w = static_cast<const uint8_t*>(op.w) + panel * groups * 512 + 64 * first;
    const uint16_t* scale = op.scale16 + panel * kPanel + 16 * first;
    F16 acc[R][J];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) acc[r][j] = zero();
    Ahead mine = ahead.take(4 * J * groups);
    for (long g = 0; g < groups; ++g) {
      I16 part[R][J];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < J; ++j) part[r][j] = begin_small<4>(-8 * sums[g * R + r]);
      if (mine.lines > 0) {
        for (int i = 0; i < 4 * J; ++i) prefetch_l2(mine.at + 64 * i);
        mine.at += 256 * J;
        mine.lines -= 4 * J;
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {  // words q and q + 4 of the group
        I16 v[J];
#pragma GCC unroll 2
        for (int j = 0; j < J; ++j) v[j] = load_bits(w + g * 512 + q * 128 + 64 * j);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          uint32_t low = x[(g * 8 + q) * R + r], high = x[(g * 8 + q + 4) * R + r];
#pragma GCC unroll 2
          for (int j = 0; j < J; ++j) part[r][j] = dot4_small<4>(part[r][j], low_nibbles(v[j]), low);
#pragma GCC unroll 2
          for (int j = 0; j < J; ++j)
            part[r][j] = dot4_small<4>(part[r][j], high_nibbles(v[j]), high);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < J; ++j)
          acc[r][j] = fma(to_float(end_small<4>(part[r][j], -8 * sums[g * R + r])),
                          load_f16(scale + g * columns + 16 * j), acc[r][j]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) store(out[r][first + j], acc[r][j]);
  }
  write_int4(op, packed, row, R, panel, out);
}

// The factors and the addends of the values of 16 columns, in vectors of 8 columns with two values
// each.
struct Factors {
  F16 scale[2], minimum[2];
};

// `block` has 32 columns, and `lane` is 0 or 16.
template <Format format>
FORGE_INLINE Factors factors_of(const Blocks& blocks, const uint8_t* block, long group, int lane) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
  const int8_t* bytes = reinterpret_cast<const int8_t*>(block + (blocks.minima ? 128 : 64));
  F16 scale = load_f16(halves + lane), minimum = zero();
  if (blocks.minima) minimum = load_f16(halves + kPanel + lane);
  if (blocks.two_levels()) {
    scale = mul(scale, load_s8(bytes + group * kPanel + lane));
    if (blocks.minima)
      minimum = mul(minimum, load_s8(bytes + (blocks.groups() + group) * kPanel + lane));
  }
  constexpr int bits = bits_of(format);
  if (is_unsigned(format) && !blocks.minima) minimum = mul(scale, splat(-float(1 << (bits - 1))));
  return {{twice_low(scale), twice_high(scale)}, {twice_low(minimum), twice_high(minimum)}};
}

constexpr long kChunk6 = 16 * kPanel * 6 / 8;  // bytes of 16 consecutive values of 6 bits
template <Format format>
constexpr int kWordsTogether = bits_of(format) == 6 ? 2 : 1;  // words that have bytes in common

// Returns two values of each of 32 columns, rounded to bfloat16 by `round`, which has two vectors of 8
// columns. They are word number `word + i` of a block's `values`. `word` is a multiple of
// `kWordsTogether`.
template <Format format, class Rounded, class Round>
FORGE_INLINE void read_word(const uint8_t* values, unsigned long word, int i, const Factors* factors,
                            Round round, Rounded* out) {
  F16 v[4];
  if constexpr (bits_of(format) == 4) {
    constexpr auto load = is_iq4(format) ? load_iq4 : load_u4;
    load(values + word * kPanel, v[0], v[1]);
    load(values + word * kPanel + 16, v[2], v[3]);
  } else if constexpr (bits_of(format) == 6) {
    const uint8_t* chunk = values + word / 8 * kChunk6;
    const uint8_t* crumbs = chunk + 8 * kPanel + word % 8 / 2 * kPanel;
    load_u6(chunk + (word % 8 + i) * kPanel, crumbs, 2 * i, v);
  } else {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) v[j] = load_s8(values + word * 2 * kPanel + 16 * j);
  }
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j)
    out[j] = round(fma(v[2 * j], factors[j].scale[0], factors[j].minimum[0]),
                   fma(v[2 * j + 1], factors[j].scale[1], factors[j].minimum[1]));
}

template <Format format, int R, int P>
void tile_blocks(const Linear& op, const PackedRows& packed, const uint32_t* x, long row,
                 long panel, Ahead ahead) {
  const Blocks& blocks = op.blocks;
  long panel_bytes = blocks.panel_bytes(format, op.K), words = blocks.group / 2;
  const uint8_t* first = panel_of(op, format, panel);
  F16 acc[R][2 * P];
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 2 * P; ++j) acc[r][j] = zero();
  for (long k = 0; k < op.K; k += blocks.size) {
    const uint8_t* block = first + k / blocks.size * blocks.bytes(format);
    const uint8_t* values = block + blocks.values();
    for (long group = 0; group < blocks.groups(); ++group) {
      Factors factors[2 * P];
#pragma GCC unroll 4
      for (int j = 0; j < 2 * P; ++j)
        factors[j] = factors_of<format>(blocks, block + j / 2 * panel_bytes, group, j % 2 * 16);
      unsigned long word = group * words;
      for (unsigned long end = word + words; word < end; word += kWordsTogether<format>) {
#pragma GCC unroll 2
        for (int i = 0; i < kWordsTogether<format>; ++i) {
          Pairs v[2 * P];
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p)
            read_word<format>(values + p * panel_bytes, word, i, factors + 2 * p, round_pairs,
                              v + 2 * p);
          if (ahead.lines > 0) {
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) prefetch_l1(ahead.at + 64 * p);
            ahead.at += 64 * P;
            ahead.lines -= P;
          }
          add_pairs(acc, v, [x](int r, int i) { return x[i * R + r]; });
          x += kPairWords * R;
        }
      }
    }
  }
  alignas(64) float out[R][2 * P][16];
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 2 * P; ++j) store(out[r][j], in_column_order(acc[r][j]));
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      write_panel(op, row + r, panel + p, load(out[r][2 * p]), load(out[r][2 * p + 1]));
}

// Unpacks a panel to the first format, once for all rows if there are many.
template <Format format>
void unpack_panel(const Linear& op, long panel, uint16_t* out) {
  const Blocks& blocks = op.blocks;
  long words = blocks.group / 2;
  const uint8_t* block = panel_of(op, format, panel);
  for (long k = 0; k < op.K; k += blocks.size, block += blocks.bytes(format)) {
    const uint8_t* values = block + blocks.values();
    for (long group = 0; group < blocks.groups(); ++group) {
      Factors factors[] = {factors_of<format>(blocks, block, group, 0),
                           factors_of<format>(blocks, block, group, 16)};
      unsigned long word = group * words;
      for (unsigned long end = word + words; word < end; word += kWordsTogether<format>) {
#pragma GCC unroll 2
        for (int i = 0; i < kWordsTogether<format>; ++i, out += 64) {
          I16 v[2];
          read_word<format>(values, word, i, factors, pairs_to_bf16, v);
          store_bits(out, v[0]);
          store_bits(out + 32, v[1]);
        }
      }
    }
  }
}

// ---- blocks times rows rounded to int8 ----------------------------------------------------------
//
// Each 32 values of k are added in order:
//   t = t + (integer sum of value * x) * scale       once per group, of which there are one or two
//   y = y + minimum * (integer sum of x * scale of x)   once per group
//   y = y + t * scale of x
// A product and the sum that it is added to are rounded once. All instruction sets give the same bits.

// The rows whose sums all fit in registers. Groups that share a scale of x need more of them.
constexpr int rows_in_registers(int together) {
  return kMaxRowsAtOnce < 6 ? 1 : together == 1 ? 6 : 4;
}
// The rows of a tile that is multiplied by an unpacked panel.
constexpr int max_unpacked_rows(int together) {
  return kMaxRowsAtOnce < 6 ? kMaxRowsInt8 : rows_in_registers(together);
}

// The order of columns in two vectors, in groups of four. The last two are of `pair_columns`.
constexpr int kOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr int kOrder8[8] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr int kOrder4[8] = {0, 4, 1, 5, 2, 6, 3, 7};

template <Format format, bool pairs = has_pair_words(format)>
constexpr const int (&order_of())[8] {
  if constexpr (pairs) return kOrder;
  if constexpr (bits_of(format) == 8) return kOrder8;
  return kOrder4;
}

// The factors of a group's columns in J vectors, in that order.
template <int J>
struct Columns {
  F16 scale[J], minimum[J];
};

// The distance in bytes at which readers prefetch. Past the end of a panel, this is the next one.
constexpr long kReadAhead = 8192;

// Reads a panel in the order of k, which is its order in memory.
template <Format format>
struct BlockReader {
  static constexpr bool kPrefetches = true;
  static constexpr int kValues = 4;     // of a column, in a word
  static constexpr int kParts = 2;      // vectors of a word
  const Blocks& blocks;
  const uint8_t* block;
  const uint8_t* values;
  long group = 0;  // index in the block
  Columns<2> factors{};

  BlockReader(const Linear& op, const uint8_t* panel) : blocks(op.blocks), block(panel) {
    begin_block();
  }

  FORGE_INLINE void begin_block() {
    values = block + blocks.values();
    for (const uint8_t* at = block; at < values; at += 64) prefetch_l2(at + kReadAhead);
    load_f16_in(order_of<format, false>(), block, factors.scale[0], factors.scale[1]);
    if (blocks.minima)
      load_f16_in(order_of<format, false>(), block + 64, factors.minimum[0], factors.minimum[1]);
  }

  // Four values of each column: word number `number` from the current position on.
  FORGE_INLINE void word(int number, I16 (&out)[2]) const {
    auto& [first, second] = out;
    if constexpr (bits_of(format) == 4) {
      const uint8_t* at = values + 64 * number;
      prefetch_l2(at + kReadAhead);
      I16 both = pair_columns(at);
      first = low_nibbles(both);
      second = high_nibbles(both);
      if constexpr (is_iq4(format)) {
        first = iq4_words(first);
        second = iq4_words(second);
      }
    } else if constexpr (bits_of(format) == 6) {
      const uint8_t* chunk = values + number / 4 * kChunk6;
      const uint8_t *at = chunk + 64 * (number % 4), *high = chunk + 256 + 32 * (number % 4);
      prefetch_l2(at + kReadAhead);
      if (number % 2 == 0) prefetch_l2(high + kReadAhead);
      I16 both = pair_columns(at), crumbs = crumb_columns(high);
      first = with_low_crumbs(low_nibbles(both), crumbs);
      second = with_high_crumbs(high_nibbles(both), crumbs);
    } else {
      const uint8_t* at = values + 128 * number;
      prefetch_l2(at + kReadAhead);
      prefetch_l2(at + 64 + kReadAhead);
      pair_columns(at, at + 64, first, second);
      first = signed_words(first);
      second = signed_words(second);
    }
  }

  // Returns the factors of a group whose words have been read. `last` means the last of a panel.
  template <int words>
  FORGE_INLINE Columns<2> end_group(bool last) {
    Columns<2> found = factors;
    values += words * 4 * kPanel * bits_of(format) / 8;
    if (blocks.two_levels()) {
      const uint8_t* bytes = block + (blocks.minima ? 128 : 64) + group * kPanel;
      Columns<2> by_group;
      load_s8_in(order_of<format, false>(), bytes, by_group.scale[0], by_group.scale[1]);
      for (int j = 0; j < 2; ++j) found.scale[j] = mul(factors.scale[j], by_group.scale[j]);
      if (blocks.minima) {
        load_s8_in(order_of<format, false>(), bytes + blocks.groups() * kPanel, by_group.minimum[0],
                   by_group.minimum[1]);
        for (int j = 0; j < 2; ++j) found.minimum[j] = mul(factors.minimum[j], by_group.minimum[j]);
      }
    }
    if (++group == blocks.groups() && !last) {
      group = 0;
      block += blocks.bytes(format);
      begin_block();
    }
    return found;
  }
};

// Reads J vectors of columns from number `first` on, of a panel that `unpack_rounded` has made.
template <Format, int words, int J>
struct UnpackedReader {
  static constexpr bool kPrefetches = false;
  static constexpr int kValues = 4;
  static constexpr int kParts = J;
  const uint8_t* values;  // [groups, words of a group, 2, 64], words in the order of products
  const float* factors;   // [groups, 2 or 4, 16]
  bool minima;

  UnpackedReader(const Linear& op, const uint8_t* unpacked, int first)
      : values(unpacked + 64 * first),
        factors(reinterpret_cast<const float*>(unpacked + op.K * kPanel) + 16 * first),
        minima(op.blocks.minima) {}

  FORGE_INLINE void word(int number, I16 (&out)[J]) const {
#pragma GCC unroll 2
    for (int j = 0; j < J; ++j) out[j] = load_bits(values + 128 * number + 64 * j);
  }

  template <int>
  FORGE_INLINE Columns<J> end_group(bool) {
    Columns<J> found{};
#pragma GCC unroll 2
    for (int j = 0; j < J; ++j) found.scale[j] = load(factors + 16 * j);
    if (minima) {
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) found.minimum[j] = load(factors + 32 + 16 * j);
    }
    values += 128 * words;
    factors += minima ? 64 : 32;
    return found;
  }
};

#if defined(FORGE_PAIR_WORDS)
// Reads pairs of values, which need no shuffles. Values of 8 bits become int16, in J vectors of columns
// from number `first` on. Values of 4 bits become int8, in one vector of all columns.
template <Format format, int words, int J>
struct PairReader {
  static constexpr bool kPrefetches = true;
  static constexpr int kValues = 2;
  static constexpr int kParts = sums_are_short(format) ? 1 : J;
  const Blocks& blocks;
  const uint8_t* block;
  int first;
  const uint8_t* values;
  long group = 0;  // index in the block
  Columns<J> factors{};

  PairReader(const Linear& op, const uint8_t* panel, int first)
      : blocks(op.blocks), block(panel), first(first) {
    begin_block();
  }

  FORGE_INLINE void begin_block() {
    values = block + blocks.values() + 32 * first;
    for (const uint8_t* at = block; at < values; at += 64) prefetch_l2(at + kReadAhead);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(block) + 16 * first;
#pragma GCC unroll 2
    for (int j = 0; j < J; ++j) {
      factors.scale[j] = load_f16(halves + 16 * j);
      if (blocks.minima) factors.minimum[j] = load_f16(halves + kPanel + 16 * j);
    }
  }

  FORGE_INLINE void word(int number, I16 (&out)[kParts]) const {
    if constexpr (sums_are_short(format)) {
      if (number % 2 == 0) prefetch_l2(values + 32 * number + kReadAhead);
      out[0] = load_nibbles(values + 32 * number);
    } else {
      prefetch_l2(values + 64 * number + kReadAhead);
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) out[j] = widen_s8(values + 64 * number + 32 * j);
    }
  }

  template <int>
  FORGE_INLINE Columns<J> end_group(bool last) {
    Columns<J> found = factors;
    values += words * 2 * kPanel * bits_of(format) / 8;
    if (blocks.two_levels()) {
      const uint8_t* bytes = block + (blocks.minima ? 128 : 64) + group * kPanel + 16 * first;
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) {
        found.scale[j] = mul(factors.scale[j], load_s8(bytes + 16 * j));
        if (blocks.minima)
          found.minimum[j] =
              mul(factors.minimum[j], load_s8(bytes + blocks.groups() * kPanel + 16 * j));
      }
    }
    if (++group == blocks.groups() && !last) {
      group = 0;
      block += blocks.bytes(format);
      begin_block();
    }
    return found;
  }
};
#endif

inline long unpacked_bytes(const Linear& op) {
  return op.K * kPanel + op.K / op.blocks.group * (op.blocks.minima ? 256 : 128);
}

// For tiles, all values become s8, and the offset is subtracted.
template <Format format, int words, bool for_tiles>
void unpack_rounded(const Linear& op, long panel, uint8_t* out) {
  BlockReader<format> reader(op, panel_of(op, format, panel));
  float* factors = reinterpret_cast<float*>(out + op.K * kPanel);
  bool has_offset = !is_unsigned(format) || !op.blocks.minima;
  I16 offset = bsplat(has_offset ? offset_of(format, op.blocks) : 0);
  for (long k = 0; k < op.K; k += 4 * words, out += 128 * words) {
    for (int i = 0; i < words; ++i) {
      I16 both[2];
      reader.word(i, both);
      for (int j = 0; j < 2; ++j)
        store_bits(out + 128 * i + 64 * j, for_tiles ? bsub(both[j], offset) : both[j]);
    }
    Columns<2> columns = reader.template end_group<words>(k + 4 * words >= op.K);
    for (int j = 0; j < 2; ++j, factors += 16) store(factors, columns.scale[j]);
    if (!op.blocks.minima) continue;
    for (int j = 0; j < 2; ++j, factors += 16) store(factors, columns.minimum[j]);
  }
}

// R x J sums in registers, or in memory that is opaque to the compiler if products need all registers.
// A sum is accessed once per 32 values of k.
template <int R, int J, bool in_memory>
struct Sums {
  F16 sums[R][J];
  F16 get(int r, int j) const { return sums[r][j]; }
  void set(int r, int j, F16 x) { sums[r][j] = x; }
};
template <int R, int J>
struct Sums<R, J, true> {
  alignas(64) float room[R][J][16];
  float* at = &room[0][0][0];
  Sums() { asm volatile("" : "+r"(at) : : "memory"); }
  Sums(const Sums&) = delete;
  F16 get(int r, int j) const { return load(at + 16 * (J * r + j)); }
  void set(int r, int j, F16 x) { store(at + 16 * (J * r + j), x); }
};

// R rows of x while they are multiplied by J vectors of columns.
template <Format format, int R, int J, int words, bool minima, class Reader>
struct RoundedRows {
  static constexpr int kValues = Reader::kValues, kParts = Reader::kParts;
  static constexpr int kTogether = kGroup / (kValues * words);  // groups per scale of x
  static constexpr bool kInMemory = R > rows_in_registers(kTogether);
  static constexpr int kBits = is_unsigned(format) ? bits_of(format) : 8;
  Sums<R, J, kInMemory> y, t;
  const uint32_t* x;
  const float* scales;
  const int32_t* starts;
  const float* minimum;

  RoundedRows(const PackedRows& packed, const uint32_t* x, long row, long K)
      : x(x),
        scales(packed.scales + row * PackedRows::groups_of(K)),
        starts(packed.sums + row * (K / (kValues * words))),
        minimum(packed.minima + row * (K / (kValues * words))) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) y.set(r, j, zero());
  }

  FORGE_INLINE static I16 begin(int32_t start) {
#if defined(FORGE_PAIR_WORDS)
    if constexpr (kValues == 2 && kBits == 4) return begin_short(start);
#endif
    if constexpr (kBits == 8) return isplat(start);
    return begin_small<kBits>(start);
  }
  FORGE_INLINE static I16 dot(I16 acc, I16 w, uint32_t x) {
#if defined(FORGE_PAIR_WORDS)
    if constexpr (kValues == 2 && kBits == 4) return dot2_short(acc, w, x);
    if constexpr (kValues == 2) return dot2_wide(acc, w, x);
#endif
    if constexpr (kBits == 8) {
      return dot4_signed(acc, w, x);
    } else {
      return dot4_small<kBits>(acc, w, x);
    }
  }
  FORGE_INLINE static void end(const I16 (&part)[kParts], int32_t start, I16 (&whole)[J]) {
#if defined(FORGE_PAIR_WORDS)
    if constexpr (kValues == 2 && kBits == 4) {
      end_short(part[0], whole);
#pragma GCC unroll 2
      for (int j = 0; j < J && minima; ++j) whole[j] = isub(whole[j], isplat(start));
      return;
    }
#endif
#pragma GCC unroll 2
    for (int j = 0; j < J; ++j) {
      if constexpr (kBits == 8) {
        whole[j] = part[j];
      } else {
        whole[j] = end_small<kBits>(part[j], start);
      }
    }
  }

  // Adds groups that share scales of x. `last` means the last of the panel.
  template <int groups>
  FORGE_INLINE void add(Reader& reader, Ahead& ahead, bool last) {
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      I16 part[R][kParts];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < kParts; ++j) part[r][j] = begin(starts[r]);
      if (!Reader::kPrefetches) ahead.read();
#pragma GCC unroll 16
      for (int i = 0; i < words; ++i) {
        I16 w[kParts];
        reader.word(i, w);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
          for (int j = 0; j < kParts; ++j) part[r][j] = dot(part[r][j], w[j], x[r]);
        x += R;
      }
      Columns<J> columns = reader.template end_group<words>(last && g + 1 == groups);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        I16 sums[J];
        end(part[r], starts[r], sums);
#pragma GCC unroll 2
        for (int j = 0; j < J; ++j) {
          F16 whole = to_float(sums[j]);
          F16 so_far = g ? fma(whole, columns.scale[j], t.get(r, j)) : mul(whole, columns.scale[j]);
          bool whole_row = g + 1 == groups;
          if (!whole_row) t.set(r, j, so_far);
          if (!whole_row && !minima) continue;
          F16 sum = y.get(r, j);
          if constexpr (minima) sum = fma(columns.minimum[j], splat(minimum[r]), sum);
          if (whole_row) sum = fma(so_far, splat(scales[r]), sum);
          y.set(r, j, sum);
        }
      }
      starts += R;
      minimum += R;
    }
    scales += R;
  }
};

// Writes the sums to `out` from vector `first` on.
template <Format format, int R, int J, int words, bool minima, class Reader>
void multiply_rounded(const Linear& op, const PackedRows& packed, Reader reader, const uint32_t* x,
                      long row, Ahead& ahead, float (&out)[R][2][16], int first) {
  using Rows = RoundedRows<format, R, J, words, minima, Reader>;
  constexpr int kTogether = Rows::kTogether;
  long groups = op.K / (Reader::kValues * words), g = 0;
  Rows rows(packed, x, row, op.K);
  for (; g + kTogether <= groups; g += kTogether)
    rows.template add<kTogether>(reader, ahead, g + kTogether == groups);
  if (kTogether > 1 && g < groups) rows.template add<1>(reader, ahead, true);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < J; ++j) store(out[r][first + j], rows.y.get(r, j));
}

template <Format format, bool pairs = has_pair_words(format)>
void write_rounded(const Linear& op, long row, long rows, long panel, const float (*out)[2][16]) {
  for (int r = 0; r < rows; ++r) {
    F16 first = load(out[r][0]), second = load(out[r][1]);
    sort_fours(order_of<format, pairs>(), first, second);
    write_panel(op, row + r, panel, first, second);
  }
}

// Multiplies R rows by a panel of blocks, whose 32 columns are read together.
template <Format format, int R>
void tile_rounded(const Linear& op, const PackedRows& packed, const uint32_t* x, long row,
                  long panel, Ahead ahead) {
  using Reader = BlockReader<format>;
  Reader reader(op, panel_of(op, format, panel));
  auto multiply = multiply_rounded<format, R, 2, 8, false, Reader>;
  if constexpr (!is_iq4(format)) {
    if (op.blocks.group != kGroup)
      multiply = op.blocks.minima ? multiply_rounded<format, R, 2, 4, true, Reader>
                                  : multiply_rounded<format, R, 2, 4, false, Reader>;
    else if (op.blocks.minima)
      multiply = multiply_rounded<format, R, 2, 8, true, Reader>;
  }
  alignas(64) float out[R][2][16];
  multiply(op, packed, reader, x, row, ahead, out, 0);
  write_rounded<format>(op, row, R, panel, out);
}

// Multiplies R rows by the panel at `w`. Several rows are multiplied by one vector of columns at a time,
// unless values have 4 bits.
template <Format format, Format as, int R, template <Format, int words, int J> class Reader>
void tile_by_vectors(const Linear& op, const PackedRows& packed, const uint8_t* w, const uint32_t* x,
                     long row, long panel, Ahead ahead) {
  using Any = Reader<as, 1, 2>;
  constexpr int J = Any::kParts == 1 ? 2 : vectors_at_once(R, 1), kWords = kGroup / Any::kValues;
  alignas(64) float out[R][2][16];
  auto multiply = [&](auto words) {
    using Mine = Reader<as, words, J>;
    for (int first = 0; first < 2; first += J)
      (op.blocks.minima ? multiply_rounded<as, R, J, words, true, Mine>
                        : multiply_rounded<as, R, J, words, false, Mine>)(
          op, packed, Mine(op, w, first), x, row, ahead, out, first);
  };
  if (op.blocks.group == kGroup) {
    multiply(std::integral_constant<int, kWords>());
  } else {
    multiply(std::integral_constant<int, kWords / 2>());
  }
  write_rounded<format>(op, row, R, panel, out);
}

// `op.w` is one unpacked panel.
template <Format format, int R>
void tile_unpacked(const Linear& op, const PackedRows& packed, const uint32_t* x, long row,
                   long panel, Ahead ahead) {
  constexpr Format kAs = is_iq4(format) ? Format::kRounded8 : format;  // once unpacked
  tile_by_vectors<format, kAs, R, UnpackedReader>(op, packed, static_cast<const uint8_t*>(op.w), x,
                                                  row, panel, ahead);
}

#if defined(FORGE_PAIR_WORDS)
template <Format format, int R>
void tile_pairs(const Linear& op, const PackedRows& packed, const uint32_t* x, long row, long panel,
               Ahead ahead) {
  tile_by_vectors<format, format, R, PairReader>(op, packed, panel_of(op, format, panel), x, row,
                                                 panel, ahead);
}
#endif

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

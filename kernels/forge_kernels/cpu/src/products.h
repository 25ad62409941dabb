// Products of R packed rows with P panels: bfloat16, int8, int4, and exact blocks.
//
// Values of blocks become bfloat16 numbers in registers. They are multiplied in the order of bfloat16
// weights, so the results have the same bits.
#pragma once

#include "pairs.h"
#include "rows.h"

namespace forge {

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

}  // namespace forge

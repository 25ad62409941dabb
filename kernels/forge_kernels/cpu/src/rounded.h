// Products of blocks with rows of x rounded to int8.
//
// Each 32 values of k are added in order:
//   t = t + (integer sum of value * x) * scale       once per group, of which there are one or two
//   y = y + minimum * (integer sum of x * scale of x)   once per group
//   y = y + t * scale of x
// A product and the sum that it is added to are rounded once. All instruction sets give the same bits.
#pragma once

#include "rows.h"

namespace forge {

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

}  // namespace forge

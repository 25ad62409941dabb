// The formats of packed weights.
//
// Weights are packed in panels of 32 columns, so that a panel is one stream of memory:
//   bf16  u16[N/32, K/2, 32, 2]
//   int8  u8 [N/32, K/4, 32, 4]  value + 128, and f32[N] scales
//   int4  u8 [N/32, K/32, 8, 64] two values + 8 per byte, and f16[K/32, N] scales (groups of 32)
//   blocks u8[N/32, K/size, bytes] of `size` values of 32 columns, as in GGUF's types (`Blocks`)
//
// N is padded to 32, and K to 2, 4 and 32, with zeros.
#pragma once

#include <cstdint>

#include "simd.h"

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

// True if rows of x are multiplied as bfloat16.
constexpr bool has_plain_rows(Format format) {
  return format == Format::kBf16 || has_exact_blocks(format);
}

inline long words_of(Format format, long K) {
  if (has_plain_rows(format)) return (K + 1) / 2;
  if (format == Format::kInt8) return (K + 3) / 4;
  return (K + kGroup - 1) / kGroup * (has_pair_words(format) ? kGroup / 2 : kGroup / 4);
}

// The bytes of one panel of w.
inline long panel_bytes_of(Format format, long K, const Blocks& blocks) {
  if (in_blocks(format)) return blocks.panel_bytes(format, K);
  return format == Format::kInt4 ? (K + kGroup - 1) / kGroup * 512 : words_of(format, K) * 128;
}

}  // namespace forge

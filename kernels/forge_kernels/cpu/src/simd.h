// Sixteen lanes of float32 or int32, for AVX-512 and for AVX2 with FMA. Both use VNNI if the compiler
// flags allow it, and AVX-512 also uses BF16.
//
// All forms give the same results up to rounding. `dot2` and `dot4` are the inner steps of every matrix
// product here. `dot2` sums two bfloat16 products into each float lane. `dot4` sums four products of u8
// and s8 into each int lane. Without VNNI, AVX2 makes the u8 signed first, so that its sums need no
// correction (`kPackedBias`). Corrected sums have the same bits in all forms. `dot2` has the same bits in
// all forms that use two FMAs, which is all except BF16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// A call moves all vectors in registers to memory and back, and GCC does not inline every function by itself.
#define FORGE_INLINE inline __attribute__((always_inline))

namespace forge {

// Hides how a sum of integers was made. Otherwise, GCC computes the products of many steps before it adds
// them, and moves them to memory and back.
template <class Vector>
FORGE_INLINE Vector opaque(Vector sum) {
  asm("" : "+v"(sum));
  return sum;
}

// Prefetch a line to the first or second level of cache. A line on its way to the first level occupies a
// miss buffer. There are few (24 in AMD's Zen 4), and loads from the second level also need them. Weights
// that are read as fast as memory delivers them are therefore prefetched to the second level.
//
// These are assembly, because GCC considers a function that only prefetches to have no effects, and drops
// calls to it.
FORGE_INLINE void prefetch_l1(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*(const char*)p)); }
FORGE_INLINE void prefetch_l2(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*(const char*)p)); }

FORGE_INLINE float bf16_to_f32(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Joins the low and the high four bits of 32 bytes with two bits above them. These are in `crumbs`: those
// from `shift` on belong to the low bits, and those from `shift + 4` on to the high ones.
FORGE_INLINE void join_u6(const void* p, const void* crumbs, int shift, __m256i& low, __m256i& high) {
  __m256i bytes = _mm256_loadu_si256(static_cast<const __m256i*>(p)), four = _mm256_set1_epi8(15);
  __m256i more = _mm256_loadu_si256(static_cast<const __m256i*>(crumbs));
  __m256i two = _mm256_set1_epi8(0x30);
  low = _mm256_or_si256(_mm256_and_si256(bytes, four),
                        _mm256_and_si256(_mm256_slli_epi16(more, 4 - shift), two));
  high = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), four),
                         _mm256_and_si256(_mm256_srli_epi16(more, shift), two));
}

// The values of GGUF's IQ4 types.
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
FORGE_INLINE __m128i iq4_values() {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values));
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define FORGE_ISA "avx512_bf16"
constexpr int kMaxRows = 14;     // rows of a tile of 32 columns: 28 of 32 registers accumulate
constexpr int kMaxRowsWide = 6;  // rows of a tile of 64 columns
#else
#if defined(__AVX512VNNI__)
#define FORGE_ISA "avx512_vnni"
#else
#define FORGE_ISA "avx512"
#endif
#define FORGE_FLOAT_PAIRS
constexpr int kMaxRows = 12;  // pairs of weights take two registers as float32
constexpr int kMaxRowsWide = 5;
#endif
constexpr int kMaxRowsInt8 = kMaxRows;
constexpr int kMaxRowsAtOnce = kMaxRows;  // rows of a tile whose 32 columns are multiplied at once

using F16 = __m512;
using I16 = __m512i;

FORGE_INLINE F16 zero() { return _mm512_setzero_ps(); }
FORGE_INLINE I16 izero() { return _mm512_setzero_si512(); }
FORGE_INLINE F16 splat(float x) { return _mm512_set1_ps(x); }
FORGE_INLINE I16 isplat(int32_t x) { return _mm512_set1_epi32(x); }
FORGE_INLINE F16 load(const float* p) { return _mm512_loadu_ps(p); }
FORGE_INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
FORGE_INLINE I16 load_bits(const void* p) { return _mm512_loadu_si512(p); }
FORGE_INLINE void store_bits(void* p, I16 x) { _mm512_storeu_si512(p, x); }
FORGE_INLINE F16 load_bf16(const uint16_t* p) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
#if defined(__AVX512BF16__)
FORGE_INLINE __m256i narrow_bf16(F16 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
FORGE_INLINE __m256i narrow_bf16(F16 x) {  // rounds ties to even
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0)));
}
#endif
FORGE_INLINE void store_bf16(uint16_t* p, F16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
FORGE_INLINE F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
FORGE_INLINE F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
FORGE_INLINE F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
FORGE_INLINE F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
FORGE_INLINE F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
FORGE_INLINE F16 abs(F16 a) { return _mm512_abs_ps(a); }
// Returns the magnitude of a positive number with the sign of another.
FORGE_INLINE F16 copy_sign(F16 magnitude, F16 sign) {
  I16 bit = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32(int(0x80000000)));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), bit));
}
FORGE_INLINE F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
FORGE_INLINE F16 fms(F16 a, F16 b, F16 c) { return _mm512_fmsub_ps(a, b, c); }
FORGE_INLINE I16 iadd(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
FORGE_INLINE I16 isub(I16 a, I16 b) { return _mm512_sub_epi32(a, b); }
FORGE_INLINE I16 bsplat(int x) { return _mm512_set1_epi8(int8_t(x)); }
FORGE_INLINE I16 bsub(I16 a, I16 b) { return _mm512_sub_epi8(a, b); }
FORGE_INLINE F16 to_float(I16 a) { return _mm512_cvtepi32_ps(a); }
FORGE_INLINE I16 to_int(F16 a) { return _mm512_cvtps_epi32(a); }
FORGE_INLINE float sum(F16 a) { return _mm512_reduce_add_ps(a); }
FORGE_INLINE float maximum(F16 a) { return _mm512_reduce_max_ps(a); }
FORGE_INLINE int32_t isum(I16 a) { return _mm512_reduce_add_epi32(a); }
FORGE_INLINE void store_s8(int8_t* p, I16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
// Replaces lanes from `count` on by `other`.
FORGE_INLINE F16 keep_first(F16 x, int count, float other) {
  __mmask16 kept = count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
  return _mm512_mask_blend_ps(kept, _mm512_set1_ps(other), x);
}
// Replaces lanes before `count` by `other`.
FORGE_INLINE F16 drop_first(F16 x, int count, float other) {
  __mmask16 dropped = count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
  return _mm512_mask_blend_ps(dropped, x, _mm512_set1_ps(other));
}
FORGE_INLINE F16 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FORGE_INLINE F16 load_s8(const void* p) {
  __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
// Returns the numbers for the low and the high four bits of sixteen bytes.
FORGE_INLINE void load_from(F16 numbers, const void* p, F16& low, F16& high) {
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  low = _mm512_permutexvar_ps(bytes, numbers);  // uses only four bits of an index
  high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers);
}
FORGE_INLINE void load_u4(const void* p, F16& low, F16& high) {
  load_from(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), p, low, high);
}
FORGE_INLINE void load_iq4(const void* p, F16& low, F16& high) {
  load_from(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(iq4_values())), p, low, high);
}
// Returns the numbers of `join_u6` for the first sixteen bytes, low and high, then for the others.
FORGE_INLINE void load_u6(const void* p, const void* crumbs, int shift, F16 (&out)[4]) {
  __m256i low, high;
  join_u6(p, crumbs, shift, low, high);
  auto floats = [](__m128i u8) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(u8)); };
  out[0] = floats(_mm256_castsi256_si128(low));
  out[1] = floats(_mm256_castsi256_si128(high));
  out[2] = floats(_mm256_extracti128_si256(low, 1));
  out[3] = floats(_mm256_extracti128_si256(high, 1));
}
// Repeats each of lanes 0 to 7, or 8 to 15, twice.
FORGE_INLINE F16 twice_low(F16 x) {
  const __m512i at = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(at, x);
}
FORGE_INLINE F16 twice_high(F16 x) {
  const __m512i at =
      _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
  return _mm512_permutexvar_ps(at, x);
}
// Pairs of numbers of 16 columns, of which `a` and `b` have eight each, rounded to bfloat16.
#if defined(__AVX512BF16__)
FORGE_INLINE I16 pairs_to_bf16(F16 a, F16 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }
using Pairs = I16;
FORGE_INLINE Pairs round_pairs(F16 a, F16 b) { return pairs_to_bf16(a, b); }
FORGE_INLINE F16 in_column_order(F16 x) { return x; }
#else
// Rounds numbers below 2^100 to bfloat16, ties to even. A sum with 1.5 * 2^16 times a number's power of two
// has no more bits. Infinity becomes NaN.
FORGE_INLINE F16 rounded(F16 x) {
  F16 power = _mm512_and_ps(x, _mm512_set1_ps(__builtin_inff())), large = _mm512_set1_ps(98304.0f);
  return _mm512_fnmadd_ps(power, large, _mm512_fmadd_ps(power, large, x));
}
FORGE_INLINE I16 pairs_to_bf16(F16 a, F16 b) {
  auto narrow = [](F16 x) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(rounded(x)), 16));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(a)), narrow(b), 1);
}
struct Pairs {
  F16 first, second;
};
FORGE_INLINE Pairs round_pairs(F16 a, F16 b) {
  a = rounded(a);
  b = rounded(b);
  return {_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)};
}
FORGE_INLINE F16 in_column_order(F16 x) {  // from the order of `round_pairs`
  const __m512i at = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return _mm512_castpd_ps(_mm512_permutexvar_pd(at, _mm512_castps_pd(x)));
}
#endif
// Returns 2^n * x for integer n.
FORGE_INLINE F16 scale_by_power(F16 x, F16 n) { return _mm512_scalef_ps(x, n); }
FORGE_INLINE F16 round_nearest(F16 x) { return _mm512_roundscale_ps(x, 0); }

#if defined(__AVX512BF16__)
FORGE_INLINE F16 dot2(F16 acc, I16 w, uint32_t x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int32_t(x)));
}
#else
FORGE_INLINE F16 dot2(F16 acc, I16 w, F16 even, F16 odd) {
  F16 w_even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  F16 w_odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int32_t(0xffff0000))));
  return _mm512_fmadd_ps(w_odd, odd, _mm512_fmadd_ps(w_even, even, acc));
}
#endif
#if defined(__AVX512VNNI__)
FORGE_INLINE I16 dot4(I16 acc, I16 w_u8, uint32_t x_s8) {
  return _mm512_dpbusd_epi32(acc, w_u8, _mm512_set1_epi32(int32_t(x_s8)));
}
// Sums products of u8 of 4 or 6 bits and s8, between `begin_small` and `end_small`.
template <int bits>
FORGE_INLINE I16 dot4_small(I16 acc, I16 w, uint32_t x_s8) {
  return dot4(acc, w, x_s8);
}
#else
FORGE_INLINE I16 dot4(I16 acc, I16 w_u8, uint32_t x_s8) {
  // Even and odd bytes separately, because pairs of u8 * s8 would overflow the 16 bits of maddubs.
  __m512i x = _mm512_set1_epi32(int32_t(x_s8));
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(w_u8, _mm512_set1_epi16(0x00ff)),
                                   _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w_u8, 8), _mm512_srai_epi16(x, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
}
template <int bits>
FORGE_INLINE I16 dot4_small(I16 acc, I16 w, uint32_t x_s8) {
  __m512i pairs = _mm512_maddubs_epi16(w, _mm512_set1_epi32(int32_t(x_s8)));
  return opaque(_mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
}
#endif
FORGE_INLINE I16 low_nibbles(I16 x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
FORGE_INLINE I16 high_nibbles(I16 x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
// Weights for `dot4`, from u8 that are s8 plus 128. Each product also adds kPackedBias times the s8 of x.
constexpr int kPackedBias = 128;
FORGE_INLINE I16 packed_words(I16 w_u8) { return w_u8; }
// Sums products of s8 and s8, for weights from `signed_words`. Each product also adds kSignedBias times
// the s8 of x.
constexpr int kSignedBias = 128;
FORGE_INLINE I16 signed_words(I16 w_s8) { return _mm512_xor_si512(w_s8, _mm512_set1_epi8(-128)); }
FORGE_INLINE I16 dot4_signed(I16 acc, I16 w, uint32_t x_s8) { return dot4(acc, w, x_s8); }
// Returns the `signed_words` of IQ4 values.
FORGE_INLINE I16 iq4_words(I16 numbers) {
  return _mm512_shuffle_epi8(signed_words(_mm512_broadcast_i32x4(iq4_values())), numbers);
}
// Combines two rows of 32 16-bit values to pairs of each column, with columns in the order of
// `kOrder8`, in groups of four.
FORGE_INLINE void pair_columns(const void* a, const void* b, I16& first, I16& second) {
  I16 x = load_bits(a), y = load_bits(b);
  first = _mm512_unpacklo_epi16(x, y);
  second = _mm512_unpackhi_epi16(x, y);
}
// Does the same for two consecutive rows of 16 such values, with columns in the order of `kOrder4`.
FORGE_INLINE I16 pair_columns(const void* p) {
  const __m512i at = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 23, 7, 22, 6, 21, 5, 20, 4,
                                      27, 11, 26, 10, 25, 9, 24, 8, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(at, load_bits(p));
}
// Returns the 32 bytes of high bits of these two rows, in the same order. The bits for the low nibbles
// are in bits 0 and 1 of a byte, and for the high nibbles in bits 4 and 5.
FORGE_INLINE I16 crumb_columns(const void* p) {
  const __m512i at = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 7, 7, 6, 6, 5, 5, 4, 4,
                                      11, 11, 10, 10, 9, 9, 8, 8, 3, 3, 2, 2, 1, 1, 0, 0);
  __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_srlv_epi16(_mm512_permutexvar_epi16(at, both), _mm512_set1_epi32(0x00020000));
}
// Adds these bits to nibbles.
FORGE_INLINE I16 with_low_crumbs(I16 nibbles, I16 crumbs) {
  return _mm512_or_si512(nibbles, _mm512_and_si512(_mm512_slli_epi16(crumbs, 4), _mm512_set1_epi8(0x30)));
}
FORGE_INLINE I16 with_high_crumbs(I16 nibbles, I16 crumbs) {
  return _mm512_or_si512(nibbles, _mm512_and_si512(crumbs, _mm512_set1_epi8(0x30)));
}
// Loads 32 values as float32, with groups of four in the given order.
FORGE_INLINE void load_f16_in(const int (&order)[8], const void* p, F16& first, F16& second) {
  const int* o = order;
  __m512i at = _mm512_setr_epi64(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]);
  __m512i halves = _mm512_permutexvar_epi64(at, load_bits(p));
  first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}
FORGE_INLINE void load_s8_in(const int (&order)[8], const void* p, F16& first, F16& second) {
  const int* o = order;
  __m256i at = _mm256_setr_epi32(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]);
  __m256i bytes = _mm256_permutevar8x32_epi32(
      _mm256_loadu_si256(static_cast<const __m256i*>(p)), at);
  first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
  second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
}

// Sorts the groups of four of 32 values from the given order.
FORGE_INLINE void sort_fours(const int (&order)[8], F16& first, F16& second) {
  int at[8];
  for (int i = 0; i < 8; ++i) at[order[i]] = 4 * i;
  auto index = [&](int i) {
    return _mm512_setr_epi32(at[i], at[i] + 1, at[i] + 2, at[i] + 3, at[i + 1], at[i + 1] + 1,
                             at[i + 1] + 2, at[i + 1] + 3, at[i + 2], at[i + 2] + 1, at[i + 2] + 2,
                             at[i + 2] + 3, at[i + 3], at[i + 3] + 1, at[i + 3] + 2, at[i + 3] + 3);
  };
  F16 low = _mm512_permutex2var_ps(first, index(0), second);
  second = _mm512_permutex2var_ps(first, index(4), second);
  first = low;
}

// Transposes 16 rows of 16 words in place. Without unrolling, GCC keeps the rows in memory.
FORGE_INLINE void transpose16(I16 r[16]) {
  I16 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Interleaves the 16-bit values of two rows of 16: a0 b0 a1 b1 ...
FORGE_INLINE I16 interleave16(const uint16_t* a, const uint16_t* b) {
  __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
  __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

FORGE_INLINE I16 imul(I16 a, I16 b) { return _mm512_mullo_epi32(a, b); }
FORGE_INLINE I16 ixor(I16 a, I16 b) { return _mm512_xor_si512(a, b); }
template <int bits>
FORGE_INLINE I16 shift_right(I16 a) {
  return _mm512_srli_epi32(a, bits);
}
// Replaces lanes, and their tokens, by those of `value` where it is greater.
FORGE_INLINE void take_greater(F16& best, I16& best_token, F16 value, I16 token) {
  __mmask16 greater = _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ);
  best = _mm512_mask_blend_ps(greater, best, value);
  best_token = _mm512_mask_blend_epi32(greater, best_token, token);
}
FORGE_INLINE int count_at_least(F16 x, float t) {
  return __builtin_popcount(_mm512_cmp_ps_mask(x, splat(t), _CMP_GE_OQ));
}
// Returns `y` where x >= t, else 0.
FORGE_INLINE F16 keep_at_least(F16 y, F16 x, float t) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(t), _CMP_GE_OQ), y);
}
// Returns `y` where x >= t, else -inf.
FORGE_INLINE F16 mask_below(F16 y, F16 x, float t) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, splat(t), _CMP_GE_OQ),
                              splat(-__builtin_inff()), y);
}
// x = 2^exponent * mantissa, with mantissa in [1, 2).
FORGE_INLINE void split(F16 x, F16& exponent, F16& mantissa) {
  exponent = _mm512_getexp_ps(x);
  mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
}
FORGE_INLINE F16 select_greater(F16 x, float t, F16 yes, F16 no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, splat(t), _CMP_GT_OQ), no, yes);
}

#elif defined(__AVX2__) && defined(__FMA__)

#if defined(__AVXVNNI__)
#define FORGE_ISA "avx2_vnni"
#else
#define FORGE_ISA "avx2"
#endif
#define FORGE_FLOAT_PAIRS
constexpr int kMaxRows = 5;  // rows of a tile of 16 columns: 10 of 16 registers accumulate
constexpr int kMaxRowsInt8 = 6;
constexpr int kMaxRowsAtOnce = 2;  // more rows are multiplied by 16 columns, then by the other 16
constexpr int kMaxRowsWide = 1;

struct F16 {
  __m256 lo, hi;
};
struct I16 {
  __m256i lo, hi;
};

FORGE_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FORGE_INLINE I16 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
FORGE_INLINE F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FORGE_INLINE I16 isplat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
FORGE_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FORGE_INLINE void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
FORGE_INLINE I16 load_bits(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
FORGE_INLINE void store_bits(void* p, I16 x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.lo);
  _mm256_storeu_si256(q + 1, x.hi);
}
FORGE_INLINE __m256 widen_bf16(const uint16_t* p) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
FORGE_INLINE F16 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
FORGE_INLINE __m256i round_bf16(__m256 x) {  // ties to even, in the low half of each word
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
FORGE_INLINE __m256i narrow_bf16(F16 x) {
  __m256i packed = _mm256_packus_epi32(round_bf16(x.lo), round_bf16(x.hi));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
FORGE_INLINE void store_bf16(uint16_t* p, F16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
FORGE_INLINE __m256 rounded(__m256 x) {
  __m256 power = _mm256_and_ps(x, _mm256_set1_ps(__builtin_inff())), large = _mm256_set1_ps(98304.0f);
  return _mm256_fnmadd_ps(power, large, _mm256_fmadd_ps(power, large, x));
}
FORGE_INLINE F16 rounded(F16 x) { return {rounded(x.lo), rounded(x.hi)}; }
FORGE_INLINE I16 pairs_to_bf16(F16 a, F16 b) {
  auto upper = [](__m256 x) { return _mm256_srli_epi32(_mm256_castps_si256(rounded(x)), 16); };
  auto narrow = [&](F16 x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(upper(x.lo), upper(x.hi)), 0xd8);
  };
  return {narrow(a), narrow(b)};
}
struct Pairs {
  F16 first, second;
};
FORGE_INLINE Pairs round_pairs(F16 a, F16 b) {
  a = rounded(a);
  b = rounded(b);
  return {{_mm256_shuffle_ps(a.lo, a.hi, 0x88), _mm256_shuffle_ps(b.lo, b.hi, 0x88)},
          {_mm256_shuffle_ps(a.lo, a.hi, 0xdd), _mm256_shuffle_ps(b.lo, b.hi, 0xdd)}};
}
FORGE_INLINE F16 in_column_order(F16 x) {
  auto half = [](__m256 x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
  };
  return {half(x.lo), half(x.hi)};
}
FORGE_INLINE __m256 floats_s8(const void* p) {
  __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
FORGE_INLINE F16 load_s8(const void* p) { return {floats_s8(p), floats_s8(static_cast<const char*>(p) + 8)}; }
template <class Change>
FORGE_INLINE void load_nibbles(const void* p, F16& low, F16& high, Change change) {
  alignas(16) uint8_t bits[2][16];
  __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p)), four = _mm_set1_epi8(15);
  __m128i upper = _mm_and_si128(_mm_srli_epi16(bytes, 4), four);
  _mm_store_si128(reinterpret_cast<__m128i*>(bits[0]), change(_mm_and_si128(bytes, four)));
  _mm_store_si128(reinterpret_cast<__m128i*>(bits[1]), change(upper));
  low = load_s8(bits[0]);
  high = load_s8(bits[1]);
}
FORGE_INLINE void load_u4(const void* p, F16& low, F16& high) {
  load_nibbles(p, low, high, [](__m128i numbers) { return numbers; });
}
FORGE_INLINE void load_iq4(const void* p, F16& low, F16& high) {
  load_nibbles(p, low, high, [](__m128i numbers) { return _mm_shuffle_epi8(iq4_values(), numbers); });
}
FORGE_INLINE void load_u6(const void* p, const void* crumbs, int shift, F16 (&out)[4]) {
  __m256i low, high;
  join_u6(p, crumbs, shift, low, high);
  alignas(32) uint8_t values[2][32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(values[0]), low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(values[1]), high);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) out[i] = load_s8(values[i % 2] + i / 2 * 16);
}
FORGE_INLINE F16 twice_half(__m256 x) {
  __m256 even = _mm256_unpacklo_ps(x, x), odd = _mm256_unpackhi_ps(x, x);
  return {_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31)};
}
FORGE_INLINE F16 twice_low(F16 x) { return twice_half(x.lo); }
FORGE_INLINE F16 twice_high(F16 x) { return twice_half(x.hi); }
#define FORGE_BOTH(op, a, b) \
  { op((a).lo, (b).lo), op((a).hi, (b).hi) }
FORGE_INLINE F16 add(F16 a, F16 b) { return FORGE_BOTH(_mm256_add_ps, a, b); }
FORGE_INLINE F16 sub(F16 a, F16 b) { return FORGE_BOTH(_mm256_sub_ps, a, b); }
FORGE_INLINE F16 mul(F16 a, F16 b) { return FORGE_BOTH(_mm256_mul_ps, a, b); }
FORGE_INLINE F16 div(F16 a, F16 b) { return FORGE_BOTH(_mm256_div_ps, a, b); }
FORGE_INLINE F16 max(F16 a, F16 b) { return FORGE_BOTH(_mm256_max_ps, a, b); }
FORGE_INLINE I16 iadd(I16 a, I16 b) { return FORGE_BOTH(_mm256_add_epi32, a, b); }
FORGE_INLINE I16 isub(I16 a, I16 b) { return FORGE_BOTH(_mm256_sub_epi32, a, b); }
FORGE_INLINE I16 bsplat(int x) { return {_mm256_set1_epi8(int8_t(x)), _mm256_set1_epi8(int8_t(x))}; }
FORGE_INLINE I16 bsub(I16 a, I16 b) { return FORGE_BOTH(_mm256_sub_epi8, a, b); }
FORGE_INLINE F16 abs(F16 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
FORGE_INLINE F16 copy_sign(F16 magnitude, F16 sign) {
  __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(magnitude.lo, _mm256_and_ps(sign.lo, bit)),
          _mm256_or_ps(magnitude.hi, _mm256_and_ps(sign.hi, bit))};
}
FORGE_INLINE F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
FORGE_INLINE F16 fms(F16 a, F16 b, F16 c) {
  return {_mm256_fmsub_ps(a.lo, b.lo, c.lo), _mm256_fmsub_ps(a.hi, b.hi, c.hi)};
}
FORGE_INLINE F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
FORGE_INLINE I16 to_int(F16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
FORGE_INLINE float sum(F16 a) {
  __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
FORGE_INLINE float maximum(F16 a) {
  __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
FORGE_INLINE int32_t isum(I16 a) {
  alignas(32) int32_t x[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(x), _mm256_add_epi32(a.lo, a.hi));
  return x[0] + x[1] + x[2] + x[3] + x[4] + x[5] + x[6] + x[7];
}
FORGE_INLINE void store_s8(int8_t* p, I16 x) {
  __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
FORGE_INLINE F16 keep_first(F16 x, int count, float other) {
  if (count >= 16) return x;
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 o = _mm256_set1_ps(other);
  __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
  __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane));
  return {_mm256_blendv_ps(o, x.lo, lo), _mm256_blendv_ps(o, x.hi, hi)};
}
FORGE_INLINE F16 drop_first(F16 x, int count, float other) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 o = _mm256_set1_ps(other);
  __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
  __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane));
  return {_mm256_blendv_ps(x.lo, o, lo), _mm256_blendv_ps(x.hi, o, hi)};
}
FORGE_INLINE F16 load_f16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
FORGE_INLINE __m256 scale_half(__m256 x, __m256 n) {
  n = _mm256_max_ps(n, _mm256_set1_ps(-127.0f));
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
FORGE_INLINE F16 scale_by_power(F16 x, F16 n) {
  return {scale_half(x.lo, n.lo), scale_half(x.hi, n.hi)};
}
FORGE_INLINE F16 round_nearest(F16 x) {
  return {_mm256_round_ps(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// Adds w * x in the register of the sum. GCC would use the register of x, and move sums to memory.
FORGE_INLINE void add_product(__m256& sum, __m256 w, __m256 x) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(w), "xm"(x));
}
// The first and the second bfloat16 of each word.
FORGE_INLINE F16 even_floats(I16 w) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w.lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(w.hi, 16))};
}
FORGE_INLINE F16 odd_floats(I16 w) {
  __m256i high = _mm256_set1_epi32(int32_t(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(w.lo, high)),
          _mm256_castsi256_ps(_mm256_and_si256(w.hi, high))};
}
FORGE_INLINE __m256i nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
FORGE_INLINE I16 low_nibbles(I16 x) { return {nibbles(x.lo), nibbles(x.hi)}; }
FORGE_INLINE I16 high_nibbles(I16 x) {
  return {nibbles(_mm256_srli_epi16(x.lo, 4)), nibbles(_mm256_srli_epi16(x.hi, 4))};
}
constexpr int kSignedBias = 0;
FORGE_INLINE I16 signed_words(I16 w_s8) { return w_s8; }
FORGE_INLINE I16 iq4_words(I16 numbers) {
  __m256i values = _mm256_broadcastsi128_si256(iq4_values());
  return {_mm256_shuffle_epi8(values, numbers.lo), _mm256_shuffle_epi8(values, numbers.hi)};
}
#if defined(__AVXVNNI__)
constexpr int kPackedBias = 128;
FORGE_INLINE I16 packed_words(I16 w_u8) { return w_u8; }
FORGE_INLINE I16 dot4(I16 acc, I16 w_u8, uint32_t x_s8) {
  __m256i x = _mm256_set1_epi32(int32_t(x_s8));
  return {_mm256_dpbusd_avx_epi32(acc.lo, w_u8.lo, x),
          _mm256_dpbusd_avx_epi32(acc.hi, w_u8.hi, x)};
}
// x is not -128, which has no opposite.
FORGE_INLINE I16 dot4_signed(I16 acc, I16 w, uint32_t x_s8) {
  __m256i x = _mm256_set1_epi32(int32_t(x_s8));
  auto half = [x](__m256i acc, __m256i w) {
    return _mm256_dpbusd_avx_epi32(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  };
  return {half(acc.lo, w.lo), half(acc.hi, w.hi)};
}
template <int bits>
FORGE_INLINE I16 dot4_small(I16 acc, I16 w, uint32_t x_s8) {
  return dot4(acc, w, x_s8);
}
#else
FORGE_INLINE __m256i add_shorts(__m256i acc, __m256i x) {
  return opaque(_mm256_add_epi32(acc, _mm256_madd_epi16(x, _mm256_set1_epi16(1))));
}
// Pairs are at most 2 * 128 * 127, provided that x is not -128.
FORGE_INLINE I16 dot4_signed(I16 acc, I16 w, uint32_t x_s8) {
  __m256i x = _mm256_set1_epi32(int32_t(x_s8));
  auto half = [x](__m256i acc, __m256i w) {
    return add_shorts(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
  };
  return {half(acc.lo, w.lo), half(acc.hi, w.hi)};
}
// Pairs of consecutive values, which are neighbors in memory. Values of 8 bits are multiplied as int16,
// because `dot4_signed` needs one more instruction per 32 products. Products with 4 bits are summed in
// int16.
#define FORGE_PAIR_WORDS
// Makes words of pairs of `count` values of rows: as int16, or twice as int8 for weights of 4 bits.
FORGE_INLINE void make_pairs(const int8_t* x, long count, int bits, void* out) {
  __m128i* to = static_cast<__m128i*>(out);
  for (long k = 0; k < count; k += 16, to += 2) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + k));
    if (bits == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_cvtepi8_epi16(bytes));
    } else {
      _mm_storeu_si128(to, _mm_unpacklo_epi16(bytes, bytes));
      _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(bytes, bytes));
    }
  }
}
FORGE_INLINE I16 widen_s8(const void* p) {  // 32 bytes
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
FORGE_INLINE I16 dot2_wide(I16 acc, I16 w, uint32_t x_s16) {
  __m256i x = _mm256_set1_epi32(int32_t(x_s16));
  return {opaque(_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, x))),
          opaque(_mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, x)))};
}
FORGE_INLINE I16 load_nibbles(const void* p) {  // 32 bytes
  __m256i both = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {nibbles(both), nibbles(_mm256_srli_epi16(both, 4))};
}
FORGE_INLINE I16 begin_short(int32_t start) {
  __m256i x = _mm256_set1_epi16(int16_t(start));
  return {x, x};
}
FORGE_INLINE I16 dot2_short(I16 acc, I16 w, uint32_t x_s8) {
  __m256i x = _mm256_set1_epi32(int32_t(x_s8));
  return {opaque(_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, x))),
          opaque(_mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, x)))};
}
// The low bits of bytes are columns 0 to 7 and 16 to 23, and the high bits are the others.
FORGE_INLINE void end_short(I16 acc, I16 (&out)[2]) {
  out[0] = {_mm256_cvtepi16_epi32(_mm256_castsi256_si128(acc.lo)),
            _mm256_cvtepi16_epi32(_mm256_castsi256_si128(acc.hi))};
  out[1] = {_mm256_cvtepi16_epi32(_mm256_extracti128_si256(acc.lo, 1)),
            _mm256_cvtepi16_epi32(_mm256_extracti128_si256(acc.hi, 1))};
}
constexpr int kPackedBias = 0;
FORGE_INLINE I16 packed_words(I16 w_u8) {
  __m256i sign = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(w_u8.lo, sign), _mm256_xor_si256(w_u8.hi, sign)};
}
FORGE_INLINE I16 dot4(I16 acc, I16 w, uint32_t x_s8) { return dot4_signed(acc, w, x_s8); }
template <int bits>
FORGE_INLINE I16 dot4_small(I16 acc, I16 w, uint32_t x_s8) {
  __m256i x = _mm256_set1_epi32(int32_t(x_s8));
  auto half = [x](__m256i acc, __m256i w) {
    __m256i products = _mm256_maddubs_epi16(w, x);
    return bits == 4 ? opaque(_mm256_add_epi16(acc, products)) : add_shorts(acc, products);
  };
  return {half(acc.lo, w.lo), half(acc.hi, w.hi)};
}
// Products with 4 bits are summed as int16 over 32 values: 16 * 15 * 127 < 2^15.
#define FORGE_SHORT_SUMS
template <int bits>
FORGE_INLINE I16 begin_small(int32_t start) {
  return isplat(bits == 4 ? 0 : start);
}
template <int bits>
FORGE_INLINE I16 end_small(I16 acc, int32_t start) {
  if (bits != 4) return acc;
  __m256i from = _mm256_set1_epi32(start);
  return {add_shorts(from, acc.lo), add_shorts(from, acc.hi)};
}
#endif
FORGE_INLINE void pair_columns(const void* a, const void* b, I16& first, I16& second) {
  I16 x = load_bits(a), y = load_bits(b);
  first = FORGE_BOTH(_mm256_unpacklo_epi16, x, y);
  second = FORGE_BOTH(_mm256_unpackhi_epi16, x, y);
}
FORGE_INLINE I16 pair_columns(const void* p) {
  I16 both = load_bits(p);
  return {_mm256_unpacklo_epi16(both.lo, both.hi), _mm256_unpackhi_epi16(both.lo, both.hi)};
}
FORGE_INLINE I16 crumb_columns(const void* p) {
  __m256i first = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  __m256i second = _mm256_srli_epi16(first, 2);
  return {_mm256_unpacklo_epi16(first, second), _mm256_unpackhi_epi16(first, second)};
}
FORGE_INLINE __m256i with_crumbs(__m256i nibbles, __m256i crumbs) {
  return _mm256_or_si256(nibbles, _mm256_and_si256(crumbs, _mm256_set1_epi8(0x30)));
}
FORGE_INLINE I16 with_low_crumbs(I16 x, I16 crumbs) {
  return {with_crumbs(x.lo, _mm256_slli_epi16(crumbs.lo, 4)),
          with_crumbs(x.hi, _mm256_slli_epi16(crumbs.hi, 4))};
}
FORGE_INLINE I16 with_high_crumbs(I16 x, I16 crumbs) {
  return {with_crumbs(x.lo, crumbs.lo), with_crumbs(x.hi, crumbs.hi)};
}
FORGE_INLINE void load_f16_in(const int (&order)[8], const void* p, F16& first, F16& second) {
  auto floats = [&](int at) {
    auto four = [&](int i) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + 8 * i));
    };
    return _mm256_cvtph_ps(_mm_unpacklo_epi64(four(order[at]), four(order[at + 1])));
  };
  first = {floats(0), floats(2)};
  second = {floats(4), floats(6)};
}
FORGE_INLINE void load_s8_in(const int (&order)[8], const void* p, F16& first, F16& second) {
  const int* o = order;
  alignas(32) int8_t bytes[32];
  __m256i at = _mm256_setr_epi32(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]);
  _mm256_store_si256(
      reinterpret_cast<__m256i*>(bytes),
      _mm256_permutevar8x32_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)), at));
  first = load_s8(bytes);
  second = load_s8(bytes + 16);
}
FORGE_INLINE void sort_fours(const int (&order)[8], F16& first, F16& second) {
  __m256 from[] = {first.lo, first.hi, second.lo, second.hi}, to[4];
  __m128 fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    fours[order[2 * i]] = _mm256_castps256_ps128(from[i]);
    fours[order[2 * i + 1]] = _mm256_extractf128_ps(from[i], 1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) to[i] = _mm256_set_m128(fours[2 * i + 1], fours[2 * i]);
  first = {to[0], to[1]};
  second = {to[2], to[3]};
}
FORGE_INLINE void transpose8(__m256i (&r)[8]) {
  __m256i t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = _mm256_unpacklo_epi64(t[4 * i + j], t[4 * i + j + 2]);
      u[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(t[4 * i + j], t[4 * i + j + 2]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}
FORGE_INLINE void transpose16(I16 r[16]) {
  __m256i quarter[4][8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    quarter[0][i] = r[i].lo;
    quarter[1][i] = r[i].hi;
    quarter[2][i] = r[i + 8].lo;
    quarter[3][i] = r[i + 8].hi;
  }
  for (auto& rows : quarter) transpose8(rows);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = {quarter[0][i], quarter[2][i]};
    r[i + 8] = {quarter[1][i], quarter[3][i]};
  }
}
FORGE_INLINE __m256i interleave_half(const uint16_t* a, const uint16_t* b) {
  __m256i even = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
  __m256i odd = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
  return _mm256_or_si256(even, _mm256_slli_epi32(odd, 16));
}
FORGE_INLINE I16 interleave16(const uint16_t* a, const uint16_t* b) {
  return {interleave_half(a, b), interleave_half(a + 8, b + 8)};
}

FORGE_INLINE I16 imul(I16 a, I16 b) { return FORGE_BOTH(_mm256_mullo_epi32, a, b); }
FORGE_INLINE I16 ixor(I16 a, I16 b) { return FORGE_BOTH(_mm256_xor_si256, a, b); }
template <int bits>
FORGE_INLINE I16 shift_right(I16 a) {
  return {_mm256_srli_epi32(a.lo, bits), _mm256_srli_epi32(a.hi, bits)};
}
FORGE_INLINE void take_half(__m256& best, __m256i& best_token, __m256 value, __m256i token) {
  __m256 greater = _mm256_cmp_ps(value, best, _CMP_GT_OQ);
  best = _mm256_blendv_ps(best, value, greater);
  best_token = _mm256_blendv_epi8(best_token, token, _mm256_castps_si256(greater));
}
FORGE_INLINE void take_greater(F16& best, I16& best_token, F16 value, I16 token) {
  take_half(best.lo, best_token.lo, value.lo, token.lo);
  take_half(best.hi, best_token.hi, value.hi, token.hi);
}
FORGE_INLINE F16 at_least(F16 x, float t) {
  __m256 s = _mm256_set1_ps(t);
  return {_mm256_cmp_ps(x.lo, s, _CMP_GE_OQ), _mm256_cmp_ps(x.hi, s, _CMP_GE_OQ)};
}
FORGE_INLINE int count_at_least(F16 x, float t) {
  F16 mask = at_least(x, t);
  return __builtin_popcount(_mm256_movemask_ps(mask.lo)) +
         __builtin_popcount(_mm256_movemask_ps(mask.hi));
}
FORGE_INLINE F16 keep_at_least(F16 y, F16 x, float t) { return FORGE_BOTH(_mm256_and_ps, y, at_least(x, t)); }
FORGE_INLINE F16 mask_below(F16 y, F16 x, float t) {
  F16 mask = at_least(x, t);
  __m256 nothing = _mm256_set1_ps(-__builtin_inff());
  return {_mm256_blendv_ps(nothing, y.lo, mask.lo), _mm256_blendv_ps(nothing, y.hi, mask.hi)};
}
FORGE_INLINE void split_half(__m256 x, __m256& exponent, __m256& mantissa) {
  __m256i bits = _mm256_castps_si256(x);
  exponent = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
  mantissa = _mm256_castsi256_ps(_mm256_or_si256(
      _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32(0x3f800000)));
}
FORGE_INLINE void split(F16 x, F16& exponent, F16& mantissa) {
  split_half(x.lo, exponent.lo, mantissa.lo);
  split_half(x.hi, exponent.hi, mantissa.hi);
}
FORGE_INLINE F16 select_greater(F16 x, float t, F16 yes, F16 no) {
  __m256 s = _mm256_set1_ps(t);
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(x.lo, s, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(x.hi, s, _CMP_GT_OQ))};
}

#else
#error "these kernels need AVX2 with FMA and F16C, or AVX-512 with BW, DQ and VL"
#endif

// The layout of two neighbors in a row of x: a word of two bfloat16, or two float32 that are `stride`
// apart. The latter is for products with FMAs, which read them directly. `store_pairs` rounds 16 numbers of
// a row, with a stride of 1.
#if defined(FORGE_FLOAT_PAIRS)
constexpr int kPairWords = 2;
FORGE_INLINE void store_pairs(uint32_t* p, F16 x) {
  alignas(64) uint16_t rounded[16];
  store_bf16(rounded, x);
  store(reinterpret_cast<float*>(p), load_bf16(rounded));
}
FORGE_INLINE F16 splat_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return splat(x);
}
FORGE_INLINE void store_pair(uint32_t* p, long stride, uint32_t bf16s) {
  p[0] = bf16s << 16;
  p[stride] = bf16s & 0xffff0000;
}
#else
constexpr int kPairWords = 1;
FORGE_INLINE void store_pair(uint32_t* p, long, uint32_t bf16s) { *p = bf16s; }
FORGE_INLINE void store_pairs(uint32_t* p, F16 x) { store_bf16(reinterpret_cast<uint16_t*>(p), x); }
#endif

// The number of vectors of columns, of two per panel, that rows are multiplied by at once.
constexpr int vectors_at_once(int rows, int panels) {
  return rows <= kMaxRowsAtOnce ? 2 * panels : 1;
}

// Adds the products of w[j] and a word of row r of x to acc[r][j]. `word(r, i)` returns that word, or its
// float32 number i.
template <int R, int J, class Word>
FORGE_INLINE void add_dot2(F16 (&acc)[R][J], const I16 (&w)[J], Word word) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) acc[r][j] = dot2(acc[r][j], w[j], word(r, 0));
#elif defined(__AVX512F__)
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j)
      acc[r][j] = dot2(acc[r][j], w[j], splat_bits(word(r, 0)), splat_bits(word(r, 1)));
#else
  // The even values of all rows come first, because 16 registers do not hold both.
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      F16 half = odd ? odd_floats(w[j]) : even_floats(w[j]);
#pragma GCC unroll 5
      for (int r = 0; r < R; ++r) {
        F16 x = splat_bits(word(r, odd));
        add_product(acc[r][j].lo, half.lo, x.lo);
        add_product(acc[r][j].hi, half.hi, x.lo);
      }
    }
#endif
}

// Adds the products of `Pairs` and a word of row r of x to acc[r][j], as `add_dot2` does. Columns of
// the sums have another order (`in_column_order`).
template <int R, int J, class Word>
FORGE_INLINE void add_pairs(F16 (&acc)[R][J], const Pairs (&w)[J], Word word) {
#if defined(FORGE_FLOAT_PAIRS)
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) {
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) acc[r][j] = fma(w[j].first, splat_bits(word(r, 0)), acc[r][j]);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) acc[r][j] = fma(w[j].second, splat_bits(word(r, 1)), acc[r][j]);
  }
#else
  add_dot2(acc, w, word);
#endif
}

#if !defined(FORGE_SHORT_SUMS)
// The beginning and the end of a sum of `dot4_small` over at most 32 values.
template <int bits>
FORGE_INLINE I16 begin_small(int32_t start) {
  return isplat(start);
}
template <int bits>
FORGE_INLINE I16 end_small(I16 acc, int32_t) {
  return acc;
}
#endif

FORGE_INLINE uint16_t f32_to_bf16(float value) {
  alignas(64) uint16_t bits[16];
  store_bf16(bits, splat(value));
  return bits[0];
}

// Returns e^x for x <= 0 (and slightly above), to about 2 units in the last place; e^-inf is 0.
FORGE_INLINE F16 exp(F16 x) {
  x = max(splat(-104.0f), x);  // this order of arguments preserves NaN
  F16 t = mul(x, splat(1.44269504088896341f));
  F16 n = round_nearest(t);
  F16 f = fma(n, splat(-0.693145751953125f), x);  // ln 2 in two parts
  f = fma(n, splat(-1.42860677e-6f), f);
  F16 p = splat(1.0f / 720);
  p = fma(p, f, splat(1.0f / 120));
  p = fma(p, f, splat(1.0f / 24));
  p = fma(p, f, splat(1.0f / 6));
  p = fma(p, f, splat(0.5f));
  p = fma(p, f, splat(1.0f));
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, n);
}

// Returns tanh x, with an absolute error of about 1e-7.
FORGE_INLINE F16 tanh(F16 x) {
  F16 e = exp(mul(abs(x), splat(-2.0f)));
  F16 y = div(sub(splat(1.0f), e), add(splat(1.0f), e));
  return copy_sign(y, x);
}

// Converts 16 values of float8_e4m3fn via float16, whose subnormal numbers are read correctly whatever
// the processor's mode for those of float32.
FORGE_INLINE F16 load_fp8(const void* p) {
  alignas(32) uint16_t half[16];
  __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
  __m256i rest = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  __m256i nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7f));
  nan = _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00));
  rest = _mm256_or_si256(_mm256_slli_epi16(rest, 7), nan);
  _mm256_store_si256(reinterpret_cast<__m256i*>(half), _mm256_or_si256(sign, rest));
  return mul(load_f16(half), splat(256.0f));
}

// Returns the natural logarithm of a positive normal number, to about 2 units in the last place.
FORGE_INLINE F16 log(F16 x) {
  F16 exponent, m;
  split(x, exponent, m);
  // m is in [sqrt(1/2), sqrt(2)), so that logarithms of numbers near 1 stay precise.
  exponent = select_greater(m, 1.41421356f, add(exponent, splat(1.0f)), exponent);
  F16 f = sub(select_greater(m, 1.41421356f, mul(m, splat(0.5f)), m), splat(1.0f));
  F16 p = splat(7.0376836292e-2f);  // Cephes' logf
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  F16 square = mul(f, f);
  p = mul(mul(p, f), square);
  p = fma(exponent, splat(-2.12194440e-4f), p);
  p = fma(square, splat(-0.5f), p);
  return fma(exponent, splat(0.693359375f), add(f, p));
}

// Loads the first `count` lanes from memory; the others are -inf.
FORGE_INLINE F16 load_first(const float* p, int count) {
  alignas(64) float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < count ? p[i] : -__builtin_inff();
  return load(lanes);
}

FORGE_INLINE F16 sigmoid(F16 x) {
  // Both branches use e^-|x|, which cannot overflow.
  F16 e = exp(sub(zero(), abs(x)));
  F16 positive = div(splat(1.0f), add(splat(1.0f), e));
  F16 negative = mul(e, positive);
#if defined(__AVX512F__)
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_LT_OQ), positive, negative);
#else
  return {_mm256_blendv_ps(positive.lo, negative.lo, x.lo),
          _mm256_blendv_ps(positive.hi, negative.hi, x.hi)};
#endif
}

}  // namespace forge

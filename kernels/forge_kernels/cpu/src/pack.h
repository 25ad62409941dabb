// Packs weights from the checkpoint's layout, bf16[N, K], into panels (see formats.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "linear.h"

namespace forge {

struct Packing {
  const uint16_t* w;  // bf16[N, K]
  long N, K;
  bool paired;  // the two halves of the rows are gate and up
  Format format;
  uint8_t* out;
  float* scale;       // int8: f32[columns of all panels]
  uint16_t* scale16;  // int4: f16[K / 32, scale_columns]
  long scale_columns;
};

// Returns the row of W for column `lane` of a panel, or -1.
inline long source_row(const Packing& op, long panel, int lane) {
  if (!op.paired) {
    long row = panel * kPanel + lane;
    return row < op.N ? row : -1;
  }
  long half = op.N / 2, row = panel * 16 + lane % 16;
  if (row >= half) return -1;
  return lane < 16 ? row : half + row;
}

inline uint16_t f32_to_f16(float value) {
  __m128i bits = _mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT);
  return uint16_t(_mm_extract_epi16(bits, 0));
}
inline float f16_to_f32(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }

// Transposes eight words of eight rows, from the word `k` on: lane i of `out`, and of each kPanel words
// after it, is row i.
inline void transpose_words(const uint16_t* const* rows, long k, uint32_t* out) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + 2 * k));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    auto* low = reinterpret_cast<__m256i*>(out + i * kPanel);
    auto* high = reinterpret_cast<__m256i*>(out + (i + 4) * kPanel);
    _mm256_storeu_si256(low, _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
    _mm256_storeu_si256(high, _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
  }
}

// Packs pairs of neighbors of 32 rows, which is a transposed matrix of words.
inline void pack_panel_bf16(const Packing& op, long panel) {
  long words = words_of(op.format, op.K), whole = op.K / 2;
  uint32_t* out = reinterpret_cast<uint32_t*>(op.out) + panel * words * kPanel;
  const uint16_t* rows[kPanel];
  bool complete = true;
  for (int lane = 0; lane < kPanel; ++lane) {
    long source = source_row(op, panel, lane);
    rows[lane] = source < 0 ? nullptr : op.w + source * op.K;
    complete &= source >= 0;
  }
  long first = complete ? whole / 8 * 8 : 0;  // the first word that is not transposed by eights
  for (long k = 0; k < first; k += 8)
    for (int lane = 0; lane < kPanel; lane += 8)
      transpose_words(rows + lane, k, out + k * kPanel + lane);
  for (int lane = 0; lane < kPanel; ++lane) {
    const uint16_t* w = rows[lane];
    long k = first;
    if (w) {
      for (; k < whole; ++k) std::memcpy(out + k * kPanel + lane, w + 2 * k, 4);
      if (k < words) out[k++ * kPanel + lane] = w[2 * whole];  // the last of an odd number
    }
    for (; k < words; ++k) out[k * kPanel + lane] = 0;
  }
}

inline void pack_panel(const Packing& op, long panel) {
  if (op.format == Format::kBf16) return pack_panel_bf16(op, panel);
  long words = words_of(op.format, op.K), groups = (op.K + kGroup - 1) / kGroup;
  std::vector<float> row(groups * kGroup);
  for (int lane = 0; lane < kPanel; ++lane) {
    long source = source_row(op, panel, lane);
    const uint16_t* w = source < 0 ? nullptr : op.w + source * op.K;
    long column = panel * kPanel + lane;
    float top = 0.0f;
    for (long k = 0; k < groups * kGroup; ++k) {
      row[k] = w && k < op.K ? bf16_to_f32(w[k]) : 0.0f;
      top = std::max(top, std::fabs(row[k]));
    }
    if (op.format == Format::kInt8) {
      uint8_t* out = op.out + panel * words * 128 + lane * 4;
      op.scale[column] = top / 127.0f;
      float inverse = top > 0.0f ? 127.0f / top : 0.0f;
      for (long k = 0; k < words * 4; ++k)
        out[k / 4 * 128 + k % 4] =
            uint8_t(128 + int(k < op.K ? std::nearbyint(row[k] * inverse) : 0.0f));
    } else {
      // As in llama.cpp's Q4_0, the value of largest magnitude becomes -8.
      uint8_t* out = op.out + panel * groups * 512 + lane % 16 * 4 + lane / 16 * 64;
      for (long g = 0; g < groups; ++g) {
        const float* x = row.data() + g * kGroup;
        float extreme = 0.0f;
        for (int k = 0; k < kGroup; ++k)
          if (std::fabs(x[k]) > std::fabs(extreme)) extreme = x[k];
        uint16_t scale = f32_to_f16(extreme / -8.0f);
        op.scale16[g * op.scale_columns + column] = scale;
        float step = f16_to_f32(scale), inverse = step != 0.0f ? 1.0f / step : 0.0f;
        for (int q = 0; q < 4; ++q) {
          for (int i = 0; i < 4; ++i) {
            auto nibble = [&](float v) {
              return int(std::min(15.0f, std::max(0.0f, std::floor(std::fma(v, inverse, 8.5f)))));
            };
            int low = nibble(x[q * 4 + i]), high = nibble(x[(q + 4) * 4 + i]);
            out[g * 512 + q * 128 + i] = uint8_t(low | high << 4);
          }
        }
      }
    }
  }
}

// ---- rows of a packed matrix, for a model whose embedding is its head ---------------------------

struct PackedEmbedding {
  const void* w;
  const float* scale;
  const uint16_t* scale16;
  const int32_t* tokens;
  uint16_t* out;  // bf16[T, K]
  long tokens_count, N, K, panels;
  Format format;
  Blocks blocks;
};

// Writes a row of a matrix in blocks, rounded as in the products.
inline void embed_row_of_blocks(const PackedEmbedding& op, const uint8_t* panel, long lane,
                                uint16_t* out) {
  const Blocks& blocks = op.blocks;
  int bits = bits_of(op.format);
  long half = lane / 16, place = lane % 16;
  auto f16_at = [](const uint8_t* p) {
    uint16_t f16;
    std::memcpy(&f16, p, 2);
    return f16_to_f32(f16);
  };
  for (long k = 0; k < op.K; ++k) {
    const uint8_t* block = panel + k / blocks.size * blocks.bytes(op.format);
    long in_block = k % blocks.size, group = in_block / blocks.group, word = in_block / 2;
    const int8_t* bytes = reinterpret_cast<const int8_t*>(block + (blocks.minima ? 128 : 64));
    const uint8_t* values = block + blocks.values();
    float scale = f16_at(block + 2 * lane);
    float minimum = blocks.minima ? f16_at(block + 2 * (kPanel + lane)) : 0.0f;
    if (blocks.two_levels()) {
      scale *= float(bytes[group * kPanel + lane]);
      if (blocks.minima) minimum *= float(bytes[(blocks.groups() + group) * kPanel + lane]);
    }
    float value;
    if (bits == 8) {
      value = float(int8_t(values[word * 2 * kPanel + lane * 2 + k % 2]));
    } else {
      long column = half * 16 + place % 8 * 2 + k % 2;
      int shift = place < 8 ? 0 : 4, number;
      if (bits == 4) {
        number = values[word * kPanel + column] >> shift & 15;
      } else {
        const uint8_t* chunk = values + word / 8 * kChunk6;
        number = chunk[word % 8 * kPanel + column] >> shift & 15;
        int crumbs = chunk[8 * kPanel + word % 8 / 2 * kPanel + column] >> (shift + word % 2 * 2);
        number |= (crumbs & 3) << 4;
      }
      value = float(is_iq4(op.format) ? kIq4Values[number] : number);
      if (is_unsigned(op.format) && !blocks.minima) minimum = -float(1 << (bits - 1)) * scale;
    }
    out[k] = f32_to_bf16(std::fma(value, scale, minimum));
  }
}

inline void embed_row(const PackedEmbedding& op, long t) {
  long token = std::min<long>(std::max(op.tokens[t], 0), op.N - 1);
  long panel = token / kPanel, lane = token % kPanel, words = words_of(op.format, op.K);
  uint16_t* out = op.out + t * op.K;
  if (in_blocks(op.format)) {
    long panel_bytes = op.blocks.panel_bytes(op.format, op.K);
    return embed_row_of_blocks(op, static_cast<const uint8_t*>(op.w) + panel * panel_bytes, lane,
                               out);
  }
  if (op.format == Format::kBf16) {
    const uint16_t* w = static_cast<const uint16_t*>(op.w) + panel * words * 64 + lane * 2;
    for (long k = 0; k < op.K; ++k) out[k] = w[k / 2 * 64 + k % 2];
  } else if (op.format == Format::kInt8) {
    const uint8_t* w = static_cast<const uint8_t*>(op.w) + panel * words * 128 + lane * 4;
    float scale = op.scale[token];
    for (long k = 0; k < op.K; ++k)
      out[k] = f32_to_bf16(float(int(w[k / 4 * 128 + k % 4]) - 128) * scale);
  } else {
    long groups = (op.K + kGroup - 1) / kGroup;
    const uint8_t* w =
        static_cast<const uint8_t*>(op.w) + panel * groups * 512 + lane % 16 * 4 + lane / 16 * 64;
    for (long k = 0; k < op.K; ++k) {
      long g = k / kGroup, word = k % kGroup / 4;
      uint8_t both = w[g * 512 + word % 4 * 128 + k % 4];
      int value = (word < 4 ? both & 15 : both >> 4) - 8;
      out[k] = f32_to_bf16(float(value) * f16_to_f32(op.scale16[g * op.panels * kPanel + token]));
    }
  }
}

}  // namespace forge

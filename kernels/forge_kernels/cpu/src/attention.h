// Causal attention over the paged cache, bfloat16 kept as its bits; the rotation and the write
// that come before it.
//
// One form for decode rows, drafts and prompt chunks: a work item is a few query rows of one
// sequence and one key/value head, and walks the keys in tiles of 64 at absolute positions 0, 64,
// 128, ... A row's bits depend on its own query and keys only: not on its place in an item, on the
// other rows, or on the number of threads. Keys beyond a row's position get the weight 0, and keys
// and values beyond the sequence's end are replaced by zeros before they are used, for what the
// cache holds there may be NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace forge {

constexpr int kKeys = 64;      // of a tile
constexpr int kItemRows = 64;  // rows of an item, about
constexpr int kMaxHeadDim = 256;
constexpr int kRowTile = kMaxRowsWide;

struct Attention {
  const uint16_t* q;   // bf16[T, H, D]
  const uint16_t* kv;  // bf16 bits [N, 2, K, bs, D]
  const int32_t* block_tables;
  const int32_t* kv_lens;
  const int32_t* cu_q_lens;
  uint16_t* out;  // bf16[T, H, D]
  long num_seqs, max_blocks;
  long heads, kv_heads, head_dim, block_size;
  float sm_scale;
};

// The keys (half 0) or values (half 1) of one head at a position.
inline const uint16_t* kv_row(const Attention& op, const int32_t* table, int half, long head,
                              long position) {
  long block = table[position / op.block_size], offset = position % op.block_size;
  return op.kv +
         (((block * 2 + half) * op.kv_heads + head) * op.block_size + offset) * op.head_dim;
}

struct AttentionItem {
  long seq, head, first, rows;  // query rows first, first + 1, ... of the sequence
};

// 64 positions of one sequence and head.
struct KVTile {
  const int32_t* table;
  long head, start, end;  // positions at and beyond `end` do not exist
};

inline KVTile kv_tile(const Attention& op, const AttentionItem& item, long tile) {
  return {op.block_tables + item.seq * op.max_blocks, item.head, tile * kKeys,
          op.kv_lens[item.seq]};
}

// Blocks lie anywhere in memory, so that the hardware does not foresee what is read next.
inline void prefetch_row(const Attention& op, const KVTile& tile, int half, long index) {
  long position = tile.start + index;
  if (position >= tile.end) return;
  const uint16_t* row = kv_row(op, tile.table, half, tile.head, position);
  for (long d = 0; d < op.head_dim; d += 32) prefetch(row + d);
}

// 64 keys -> [D/2][64] words of two neighbours in d; reads `next` into the cache meanwhile.
inline void pack_keys(const Attention& op, const KVTile& tile, const KVTile& next, uint32_t* out) {
  for (long group = 0; group < kKeys; group += 16) {
    const uint16_t* rows[16];
    for (long i = 0; i < 16; ++i) {
      long position = tile.start + group + i;
      rows[i] = position < tile.end ? kv_row(op, tile.table, 0, tile.head, position) : nullptr;
    }
    for (long d = 0; d < op.head_dim; d += 32) {
      I16 block[16];
      for (int i = 0; i < 16; ++i) block[i] = rows[i] ? load_bits(rows[i] + d) : izero();
      transpose16(block);
      for (int i = 0; i < 16; ++i) store_bits(out + (d / 2 + i) * kKeys + group, block[i]);
    }
    for (long i = 0; i < 16; ++i) prefetch_row(op, next, 0, group + i);
  }
}

// 64 values -> [32][D] words of two neighbouring keys; reads `next` into the cache meanwhile.
inline void pack_values(const Attention& op, const KVTile& tile, const KVTile& next,
                        uint32_t* out) {
  alignas(64) static const uint16_t nothing[kMaxHeadDim] = {};
  for (long pair = 0; pair < kKeys / 2; ++pair) {
    const uint16_t* rows[2];
    for (int i = 0; i < 2; ++i) {
      long position = tile.start + 2 * pair + i;
      rows[i] = position < tile.end ? kv_row(op, tile.table, 1, tile.head, position) : nothing;
      prefetch_row(op, next, 1, 2 * pair + i);
    }
    for (long d = 0; d < op.head_dim; d += 16)
      store_bits(out + pair * op.head_dim + d, interleave16(rows[0] + d, rows[1] + d));
  }
}

// acc[r][c] += sum over w of x[r][w] * y[w][c]: R rows, 4 x 16 columns.
template <int R>
inline void multiply64(const uint32_t* x, long x_stride, const uint32_t* y, long y_stride,
                       long words, F16 acc[R][4]) {
  for (long w = 0; w < words; ++w) {
    I16 v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) v[j] = load_bits(y + w * y_stride + 16 * j);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = dot2(acc[r][j], v[j], x[r * x_stride + w]);
    }
  }
}

template <int R>
inline void multiply16(const uint32_t* x, long x_stride, const uint32_t* y, long y_stride,
                       long words, F16 acc[R]) {
  for (long w = 0; w < words; ++w) {
    I16 v = load_bits(y + w * y_stride);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r] = dot2(acc[r], v, x[r * x_stride + w]);
  }
}

// What one thread works with: packed keys and values, weights, outputs.
struct AttentionScratch {
  uint32_t* keys;     // [D/2][64]
  uint32_t* values;   // [32][D]
  uint32_t* weights;  // [rows][32], pairs of bf16
  float* out;         // [rows][D]
  float* top;         // [rows]
  float* total;       // [rows]
};

template <int R>
void attend_rows(const Attention& op, const uint16_t* const* q, const long* visible, long tile,
                 long row, const AttentionScratch& s) {
  long D = op.head_dim, start = tile * kKeys;
  F16 scores[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) scores[r][j] = zero();
  for (long w = 0; w < D / 2; ++w) {
    I16 v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) v[j] = load_bits(s.keys + w * kKeys + 16 * j);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, q[r] + 2 * w, 4);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) scores[r][j] = dot2(scores[r][j], v[j], pair);
    }
  }
  float decay[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    long seen = visible[r] - start;
    F16 best = splat(s.top[row + r]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F16 x = mul(scores[r][j], splat(op.sm_scale));
      scores[r][j] = keep_first(x, int(std::min(seen - 16 * j, 16L)), kNone);
      best = max(best, scores[r][j]);
    }
    float top = maximum(best);
    F16 sums = zero();
    uint16_t* weights = reinterpret_cast<uint16_t*>(s.weights + (row + r) * (kKeys / 2));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F16 e = exp(sub(scores[r][j], splat(top)));
      sums = add(sums, e);
      store_bf16(weights + 16 * j, e);
    }
    decay[r] = s.top[row + r] == top ? 1.0f : std::exp(s.top[row + r] - top);
    s.top[row + r] = top;
    s.total[row + r] = s.total[row + r] * decay[r] + sum(sums);
  }
  const uint32_t* weights = s.weights + row * (kKeys / 2);
  long d = 0;
  for (; d + 64 <= D; d += 64) {
    F16 acc[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        acc[r][j] = mul(load(s.out + (row + r) * D + d + 16 * j), splat(decay[r]));
    multiply64<R>(weights, kKeys / 2, s.values + d, D, kKeys / 2, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) store(s.out + (row + r) * D + d + 16 * j, acc[r][j]);
  }
  for (; d < D; d += 16) {
    F16 acc[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r] = mul(load(s.out + (row + r) * D + d), splat(decay[r]));
    multiply16<R>(weights, kKeys / 2, s.values + d, D, kKeys / 2, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) store(s.out + (row + r) * D + d, acc[r]);
  }
}

inline void attend_item(const Attention& op, const AttentionItem& item,
                        const AttentionItem* next) {
  long D = op.head_dim, G = op.heads / op.kv_heads, rows = item.rows * G;
  long q_start = op.cu_q_lens[item.seq], q_len = op.cu_q_lens[item.seq + 1] - q_start;
  long kv_len = op.kv_lens[item.seq];
  AttentionScratch s;
  s.keys = scratch<uint32_t>(0, D / 2 * kKeys);
  s.values = scratch<uint32_t>(1, kKeys / 2 * D);
  s.weights = scratch<uint32_t>(2, rows * (kKeys / 2));
  s.out = scratch<float>(3, rows * D);
  s.top = scratch<float>(4, 2 * rows);
  s.total = s.top + rows;
  const uint16_t** q = scratch<const uint16_t*>(5, rows);
  long* visible = scratch<long>(6, rows);
  for (long i = 0; i < rows; ++i) {
    long row = item.first + i / G;
    q[i] = op.q + ((q_start + row) * op.heads + item.head * G + i % G) * D;
    visible[i] = kv_len - q_len + row + 1;
    s.top[i] = -1e30f;  // finite, so that e^(-inf - top) is 0
    s.total[i] = 0.0f;
  }
  std::fill(s.out, s.out + rows * D, 0.0f);
  long longest = visible[rows - 1];
  for (long tile = 0; tile * kKeys < longest; ++tile) {
    KVTile next_tile = (tile + 1) * kKeys < longest ? kv_tile(op, item, tile + 1)
                       : next                       ? kv_tile(op, *next, 0)
                                                    : KVTile{};
    pack_keys(op, kv_tile(op, item, tile), next_tile, s.keys);
    pack_values(op, kv_tile(op, item, tile), next_tile, s.values);
    for (long row = 0; row < rows;) {
      long n = std::min<long>(kRowTile, rows - row);
      switch (n) {
        case 1: attend_rows<1>(op, q + row, visible + row, tile, row, s); break;
        case 2: attend_rows<2>(op, q + row, visible + row, tile, row, s); break;
        case 3: attend_rows<3>(op, q + row, visible + row, tile, row, s); break;
        case 4: attend_rows<4>(op, q + row, visible + row, tile, row, s); break;
        case 5: attend_rows<5>(op, q + row, visible + row, tile, row, s); break;
        default: attend_rows<6>(op, q + row, visible + row, tile, row, s); break;
      }
      row += n;
    }
  }
  for (long i = 0; i < rows; ++i) {
    F16 scale = splat(s.total[i] == 0.0f ? 1.0f : 1.0f / s.total[i]);
    long row = item.first + i / G;
    uint16_t* out = op.out + ((q_start + row) * op.heads + item.head * G + i % G) * D;
    for (long d = 0; d < D; d += 16) store_bf16(out + d, mul(load(s.out + i * D + d), scale));
  }
}

inline void run_attention(xla::ffi::ThreadPool& pool, const Attention& op) {
  long G = op.heads / op.kv_heads, most = std::max(1L, kItemRows / G);
  std::vector<AttentionItem> items;
  for (long seq = 0; seq < op.num_seqs; ++seq) {
    long q_len = op.cu_q_lens[seq + 1] - op.cu_q_lens[seq];
    for (long head = 0; head < op.kv_heads; ++head)
      for (long first = 0; first < q_len; first += most)
        items.push_back({seq, head, first, std::min(most, q_len - first)});
  }
  long count = long(items.size());
  auto attend = [&](long i) {
    attend_item(op, items[i], i + 1 < count ? &items[i + 1] : nullptr);
  };
  Team(pool, count).run(phase(count, attend));
}

// ---- rotation and write -----------------------------------------------------------------------

struct RotateWrite {
  const uint16_t* qkv;  // bf16[T, H + 2K, D]
  const float* cos;     // f32[T, D / 2]
  const float* sin;
  const int32_t* slot_mapping;  // [T], at or beyond N * bs: not written
  uint16_t* q;                  // bf16[T, H, D]
  uint16_t* kv;
  long tokens, num_blocks;
  long heads, kv_heads, head_dim, block_size;
};

inline void rotate(const uint16_t* x, const float* cos, const float* sin, long D, uint16_t* out) {
  long half = D / 2;
  for (long d = 0; d < half; d += 16) {
    long n = half - d;
    if (n >= 16) {
      F16 a = load_bf16(x + d), b = load_bf16(x + half + d), c = load(cos + d), s = load(sin + d);
      store_bf16(out + d, sub(mul(a, c), mul(b, s)));
      store_bf16(out + half + d, add(mul(b, c), mul(a, s)));
    } else {
      for (long i = d; i < half; ++i) {
        float a = bf16_to_f32(x[i]), b = bf16_to_f32(x[half + i]);
        out[i] = f32_to_bf16(a * cos[i] - b * sin[i]);
        out[half + i] = f32_to_bf16(b * cos[i] + a * sin[i]);
      }
    }
  }
}

inline void run_rotate_write(xla::ffi::ThreadPool& pool, const RotateWrite& op) {
  long H = op.heads, K = op.kv_heads, D = op.head_dim, bs = op.block_size;
  constexpr long kTokens = 16;  // of an item
  auto body = [&](long item) {
    for (long t = item * kTokens; t < std::min(op.tokens, (item + 1) * kTokens); ++t) {
      const uint16_t* row = op.qkv + t * (H + 2 * K) * D;
      const float *cos = op.cos + t * (D / 2), *sin = op.sin + t * (D / 2);
      for (long h = 0; h < H; ++h) rotate(row + h * D, cos, sin, D, op.q + (t * H + h) * D);
      long slot = op.slot_mapping[t];
      if (slot < 0 || slot >= op.num_blocks * bs) continue;
      uint16_t* block = op.kv + slot / bs * 2 * K * bs * D + slot % bs * D;
      for (long k = 0; k < K; ++k) {
        rotate(row + (H + k) * D, cos, sin, D, block + k * bs * D);
        std::memcpy(block + (K + k) * bs * D, row + (H + K + k) * D, D * 2);
      }
    }
  };
  long items = (op.tokens + kTokens - 1) / kTokens;
  Team team(pool, items);
  team.run(phase(items, body));
}

}  // namespace forge

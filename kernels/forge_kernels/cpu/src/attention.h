// Causal attention over the paged cache, and the RoPE and write that precede it. The cache is in
// bfloat16, stored as bits, or in 8 bits with a scale per row.
//
// Decode rows, drafts and prefill chunks are computed in the same way. A work item is a few query rows
// of one sequence and one key/value head. It processes the keys in tiles of 64 at absolute positions 0,
// 64, 128, ... Tiles are summed in chunks of 512 keys, also at absolute positions. The sums of chunks
// are merged in order, whether one thread computes them or several. A row's bits therefore depend only
// on its own query and keys. Its place in an item, other rows and the number of threads do not matter.
//
// Keys outside a row's range get the weight 0. A key that no row of an item attends to is replaced by
// zeros, and so is its value: the cache may contain NaN there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "parallel.h"
#include "simd.h"

namespace forge {

constexpr int kKeys = 64;        // per tile
constexpr long kChunkTiles = 8;  // 512 keys
constexpr long kItemRows[] = {256, 128, 64};  // approximate rows per item
constexpr int kMaxHeadDim = 512;
constexpr int kWeightWords = kKeys / 2 * kPairWords;  // per row
constexpr int kRowTile = kMaxRowsWide > 1 ? kMaxRowsWide : 4;
constexpr float kNoScore = -1e30f;  // finite, so that e^(-inf - kNoScore) is 0

enum class KVType { kBf16, kInt8, kFp8 };  // float8_e4m3fn

struct Attention {
  const uint16_t* q;   // bf16[T, H, D]
  const void* kv;      // bits [N, 2, K, bs, D]
  const float* scale;  // [N, 2, K, bs], for caches in 8 bits
  KVType type;
  const int32_t* block_tables;
  const int32_t* kv_lens;
  const int32_t* cu_q_lens;
  const float* sinks;  // [H], or null
  uint16_t* out;       // bf16[T, H, D]
  long num_seqs, max_blocks;
  long heads, kv_heads, head_dim, block_size;
  float sm_scale;
  long window;     // the maximum number of keys that a row attends to
  float soft_cap;  // 0: none
};

struct AttentionItem {
  long seq, head, first, rows;  // query rows first, first + 1, ... of the sequence
  long first_chunk, chunks;     // range of chunks to process
};

// The first key of a row that attends to keys before `visible`.
inline long first_key(const Attention& op, long visible) {
  return std::max(0L, visible - op.window);
}

// The end of the keys that row `row` of a sequence attends to.
inline long visible_keys(const Attention& op, long seq, long row) {
  return op.kv_lens[seq] - (op.cu_q_lens[seq + 1] - op.cu_q_lens[seq]) + row + 1;
}

// The cache rows of the keys at 64 positions of one sequence and head. A row is -1 if no row of the
// item attends to the key. Values are `kv_heads * block_size` rows after their keys.
struct KVTile {
  long at[kKeys];
};

inline void find_tile(const Attention& op, const AttentionItem& item, long tile, KVTile& out) {
  long begin = first_key(op, visible_keys(op, item.seq, item.first)), end = op.kv_lens[item.seq];
  const int32_t* table = op.block_tables + item.seq * op.max_blocks;
  long position = tile * kKeys, bs = op.block_size;
  long index = position / bs, offset = position % bs;
  for (long i = 0; i < kKeys;) {
    bool exists = position + i < end;  // the table ends where the sequence does
    long row = exists ? (table[index] * 2 * op.kv_heads + item.head) * bs + offset : 0;
    long run = std::min(bs - offset, kKeys - i);
    for (long j = 0; j < run; ++j, ++i) {
      long at = position + i;
      out.at[i] = begin <= at && at < end ? row + j : -1;
    }
    ++index, offset = 0;
  }
}

template <KVType type>
const uint8_t* kv_row(const Attention& op, long at) {
  return static_cast<const uint8_t*>(op.kv) + at * op.head_dim * (type == KVType::kBf16 ? 2 : 1);
}

// Prefetches the keys and values of the next tile, in equal parts while this one is multiplied. Blocks
// are anywhere in memory, so the hardware's prefetcher cannot predict the next read. All lines at once
// would exceed the miss buffers (see `prefetch_l2`), and packing would wait for them.
class TileAhead {
 public:
  // All lines are prefetched in `steps` calls of `read`.
  void begin(const Attention& op, const KVTile& tile, long steps) {
    long bytes = op.head_dim * (op.type == KVType::kBf16 ? 2 : 1), lines = 0;
    long behind = op.kv_heads * op.block_size * bytes;
    clear();
    for (long i = 0, n; i < kKeys; i += n) {
      n = 1;
      if (tile.at[i] < 0) continue;
      while (i + n < kKeys && tile.at[i + n] == tile.at[i] + n) ++n;
      const uint8_t* keys = static_cast<const uint8_t*>(op.kv) + tile.at[i] * bytes;
      for (const uint8_t* run : {keys, keys + behind}) runs_[count_++] = {run, run + n * bytes};
      lines += 2 * ((n * bytes + 63) / 64);
    }
    each_ = (lines + steps - 1) / steps;
  }
  void clear() { count_ = next_ = 0, now_ = {}; }

  bool left() const { return now_.at < now_.end || next_ < count_; }
  FORGE_INLINE void read() {
    for (long i = 0; i < each_; ++i, now_.at += 64) {
      if (now_.at >= now_.end) {
        if (next_ == count_) return;
        now_ = runs_[next_++];
      }
      prefetch_l2(now_.at);
    }
  }

 private:
  struct Run {
    const uint8_t *at = nullptr, *end = nullptr;
  };
  Run now_, runs_[2 * kKeys];
  int count_ = 0, next_ = 0;
  long each_ = 0;  // lines per call
};

// Returns a row as bf16, which represents 8 bits exactly. `room`: [D].
template <KVType type>
const uint16_t* bf16_row(const Attention& op, long at, uint16_t* room) {
  const uint8_t* row = kv_row<type>(op, at);
  if (type == KVType::kBf16) return reinterpret_cast<const uint16_t*>(row);
  for (long d = 0; d < op.head_dim; d += 16)
    store_bf16(room + d, type == KVType::kInt8 ? load_s8(row + d) : load_fp8(row + d));
  return room;
}

// Packs 64 keys to [D/2][64] words of two neighbors in d.
template <KVType type>
void pack_keys(const Attention& op, const KVTile& tile, uint32_t* out) {
  long D = op.head_dim;
  alignas(64) uint16_t room[16][type == KVType::kBf16 ? 1 : kMaxHeadDim];
  for (long group = 0; group < kKeys; group += 16) {
    const uint16_t* rows[16];
    for (long i = 0; i < 16; ++i) {
      long at = tile.at[group + i];
      rows[i] = at < 0 ? nullptr : bf16_row<type>(op, at, room[i]);
    }
    for (long d = 0; d < D; d += 32) {
      I16 block[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) block[i] = rows[i] ? load_bits(rows[i] + d) : izero();
      transpose16(block);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store_bits(out + (d / 2 + i) * kKeys + group, block[i]);
    }
  }
}

// Packs 64 values to [32][D] words of two neighboring keys.
template <KVType type>
void pack_values(const Attention& op, const KVTile& tile, uint32_t* out) {
  alignas(64) static const uint16_t nothing[kMaxHeadDim] = {};
  alignas(64) uint16_t room[2][type == KVType::kBf16 ? 1 : kMaxHeadDim];
  long D = op.head_dim, behind = op.kv_heads * op.block_size;
  for (long pair = 0; pair < kKeys / 2; ++pair) {
    const uint16_t* rows[2];
    for (int i = 0; i < 2; ++i) {
      long at = tile.at[2 * pair + i];
      rows[i] = at < 0 ? nothing : bf16_row<type>(op, at + behind, room[i]);
    }
    for (long d = 0; d < D; d += 16)
      store_bits(out + pair * D + d, interleave16(rows[0] + d, rows[1] + d));
  }
}

// Loads the scales of 64 keys, then of their values; 0 for keys that are not used.
inline void load_scales(const Attention& op, const KVTile& tile, float* out) {
  long behind = op.kv_heads * op.block_size;
  for (long i = 0; i < kKeys; ++i) {
    out[i] = tile.at[i] < 0 ? 0.0f : op.scale[tile.at[i]];
    out[kKeys + i] = tile.at[i] < 0 ? 0.0f : op.scale[tile.at[i] + behind];
  }
}

template <KVType type>
void pack_tile(const Attention& op, const KVTile& tile, uint32_t* keys, uint32_t* values,
               float* scales) {
  pack_keys<type>(op, tile, keys);
  pack_values<type>(op, tile, values);
  if (type != KVType::kBf16) load_scales(op, tile, scales);
}

// The number of vectors, of 4 for 64 keys, that rows are multiplied by at once.
constexpr int vectors_of(int rows) {
  return rows == 1 || kMaxRowsWide > 1 ? 4 : rows == 2 ? 2 : 1;
}

// Adds the products of R rows of x and J vectors of 16 columns of y, which has `words` rows of words of two
// numbers. `word(r, w, i)` returns word w of row r of x, or its float32 number i.
template <int R, int J, class Word>
FORGE_INLINE void multiply_rows(Word word, const uint32_t* y, long y_stride, long words,
                                TileAhead& ahead, F16 (&acc)[R][J]) {
  for (long w = 0; w < words; ++w) {
    if (ahead.left()) ahead.read();
    I16 v[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) v[j] = load_bits(y + w * y_stride + 16 * j);
    add_dot2(acc, v, [&](int r, int i) { return word(r, w, i); });
  }
}

// Scales R rows of `out` by their decay, and adds the weighted values, in J vectors of 16 columns.
template <int R, int J>
FORGE_INLINE void add_values(const uint32_t* weights, const uint32_t* values, long D,
                             const float (&decay)[R], TileAhead& ahead, float* out) {
  F16 acc[R][J];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) acc[r][j] = mul(load(out + r * D + 16 * j), splat(decay[r]));
  auto weight = [&](int r, long w, int i) {
    return weights[r * kWeightWords + kPairWords * w + i];
  };
  multiply_rows(weight, values, D, kKeys / 2, ahead, acc);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) store(out + r * D + 16 * j, acc[r][j]);
}

// The sums of each row over some of the keys. These are the largest score, the sum of the weights
// relative to it, and the sum of the values with these weights.
struct SoftmaxSums {
  float* top;    // [rows]
  float* total;  // [rows]
  float* out;    // [rows][D]

  static long size(long rows, long D) { return rows * (D + 2); }
  static SoftmaxSums at(float* memory, long rows) {
    return {memory, memory + rows, memory + 2 * rows};
  }
  void clear(long rows, long D) const {
    std::fill(top, top + rows, kNoScore);
    std::fill(total, total + rows * (D + 1), 0.0f);
  }
};

// Adds the sums of the next chunk. A chunk outside a row's range changes nothing.
inline void merge(const SoftmaxSums& sums, const SoftmaxSums& next, long rows, long D) {
  for (long i = 0; i < rows; ++i) {
    float top = std::max(sums.top[i], next.top[i]);
    float before = sums.top[i] == top ? 1.0f : std::exp(sums.top[i] - top);
    float after = next.top[i] == top ? 1.0f : std::exp(next.top[i] - top);
    sums.top[i] = top;
    sums.total[i] = std::fma(sums.total[i], before, next.total[i] * after);
    float *out = sums.out + i * D, *more = next.out + i * D;
    for (long d = 0; d < D; d += 16)
      store(out + d, fma(load(out + d), splat(before), mul(load(more + d), splat(after))));
  }
}

// The buffers of one thread.
struct AttentionScratch {
  const uint32_t** q;  // [rows], of pairs as in `store_pairs`
  long* visible;       // [rows]
  uint32_t* keys;      // [D/2][64]
  uint32_t* values;    // [32][D]
  uint32_t* weights;   // [rows][32] pairs
  float* scales;       // [2][64], of keys and values in 8 bits
};

// `kPlain`: a cache of 16 bits, no window and no soft cap.
template <int R, bool kPlain>
void attend_rows(const Attention& op, const AttentionScratch& s, long tile, long row,
                 TileAhead& ahead, const SoftmaxSums& sums) {
  long D = op.head_dim, start = tile * kKeys;
  constexpr int J = vectors_of(R);
  const uint32_t* q[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) q[r] = s.q[row + r];
  F16 scores[R][4];
#pragma GCC unroll 4
  for (int first = 0; first < 4; first += J) {
    F16 acc[R][J];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) acc[r][j] = zero();
    auto query = [&](int r, long w, int i) {
      uint32_t word;
      std::memcpy(&word, q[r] + kPairWords * w + i, 4);
      return word;
    };
    multiply_rows(query, s.keys + 16 * first, kKeys, D / 2, ahead, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) scores[r][first + j] = acc[r][j];
  }
  float decay[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    long seen = s.visible[row + r] - start;
    long passed = kPlain ? 0 : first_key(op, s.visible[row + r]) - start;
    F16 best = splat(sums.top[row + r]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F16 x = mul(scores[r][j], splat(op.sm_scale));
      if (!kPlain && op.scale) x = mul(x, load(s.scales + 16 * j));
      if (!kPlain && op.soft_cap != 0.0f)
        x = mul(splat(op.soft_cap), tanh(div(x, splat(op.soft_cap))));
      x = keep_first(x, int(std::min(seen - 16 * j, 16L)), kNone);
      if (!kPlain && passed > 16 * j) x = drop_first(x, int(std::min(passed - 16 * j, 16L)), kNone);
      scores[r][j] = x;
      best = max(best, x);
    }
    float top = maximum(best);
    F16 total = zero();
    uint32_t* weights = s.weights + (row + r) * kWeightWords;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F16 e = exp(sub(scores[r][j], splat(top)));
      total = add(total, e);
      if (!kPlain && op.scale) e = mul(e, load(s.scales + kKeys + 16 * j));
      store_pairs(weights + 8 * kPairWords * j, e);
    }
    decay[r] = sums.top[row + r] == top ? 1.0f : std::exp(sums.top[row + r] - top);
    sums.top[row + r] = top;
    sums.total[row + r] = std::fma(sums.total[row + r], decay[r], sum(total));
  }
  const uint32_t* weights = s.weights + row * kWeightWords;
  float* out = sums.out + row * D;
  long d = 0;
  for (; d + 16 * J <= D; d += 16 * J)
    add_values<R, J>(weights, s.values + d, D, decay, ahead, out + d);
  for (; d < D; d += 16) add_values<R, 1>(weights, s.values + d, D, decay, ahead, out + d);
}

// The existing tiles of an item in one of its chunks: [first, last).
struct TileRange {
  long first, last;
};

inline TileRange tiles_of(const Attention& op, const AttentionItem& item, long chunk) {
  long begin = first_key(op, visible_keys(op, item.seq, item.first));
  long end = visible_keys(op, item.seq, item.first + item.rows - 1);
  return {std::max(chunk * kChunkTiles, begin / kKeys),
          std::min((chunk + 1) * kChunkTiles, (end + kKeys - 1) / kKeys)};
}

inline AttentionScratch prepare(const Attention& op, const AttentionItem& item) {
  long D = op.head_dim, G = op.heads / op.kv_heads, rows = item.rows * G;
  AttentionScratch s;
  s.keys = scratch<uint32_t>(0, D / 2 * kKeys);
  s.values = scratch<uint32_t>(1, kKeys / 2 * D);
  s.weights = scratch<uint32_t>(2, rows * kWeightWords + (kPairWords > 1 ? rows * D : 0));
  s.scales = scratch<float>(3, 2 * kKeys);
  s.q = scratch<const uint32_t*>(4, rows);
  s.visible = scratch<long>(5, rows);
  for (long i = 0; i < rows; ++i) {
    long row = item.first + i / G;
    long head = (op.cu_q_lens[item.seq] + row) * op.heads + item.head * G + i % G;
    const uint16_t* q = op.q + head * D;
    s.q[i] = reinterpret_cast<const uint32_t*>(q);
    if (kPairWords > 1) {
      uint32_t* pairs = s.weights + rows * kWeightWords + i * D;
      for (long d = 0; d < D; d += 16)
        store(reinterpret_cast<float*>(pairs + d), load_bf16(q + d));
      s.q[i] = pairs;
    }
    s.visible[i] = visible_keys(op, item.seq, row);
  }
  return s;
}

inline bool is_plain(const Attention& op) {
  return !op.scale && op.soft_cap == 0.0f && op.window == std::numeric_limits<long>::max();
}

template <bool kPlain, size_t... R>
auto pick_rows(long rows, std::index_sequence<R...>) {
  static constexpr decltype(&attend_rows<1, kPlain>) functions[] = {attend_rows<int(R) + 1, kPlain>...};
  return functions[rows - 1];
}

template <bool kPlain>
void attend_tile(const Attention& op, const AttentionScratch& s, long tile, long rows,
                 TileAhead& ahead, const SoftmaxSums& sums) {
  for (long row = 0; row < rows;) {
    long n = std::min<long>(kRowTile, rows - row);
    pick_rows<kPlain>(n, std::make_index_sequence<kRowTile>())(op, s, tile, row, ahead, sums);
    row += n;
  }
}

// The approximate number of words that `multiply_rows` reads for a tile.
inline long steps_of(long rows, long D) {
  long together = 16 * vectors_of(int(std::min<long>(rows, kRowTile)));
  long words = D / 2 * (kKeys / together) + kKeys / 2 * std::max(1L, D / together);
  return (rows + kRowTile - 1) / kRowTile * words;
}

// A tile of an item, or nothing if `item` is null.
struct TileOf {
  const AttentionItem* item;
  long tile;
};

// Computes the sums of an item's rows over one of its chunks. `after` is prefetched at the end.
inline void attend_chunk(const Attention& op, const AttentionItem& item,
                         const AttentionScratch& s, long chunk, const TileOf& after,
                         const SoftmaxSums& sums) {
  long rows = item.rows * (op.heads / op.kv_heads);
  sums.clear(rows, op.head_dim);
  TileRange tiles = tiles_of(op, item, chunk);
  KVTile found[2];
  TileAhead ahead;
  if (tiles.first < tiles.last) find_tile(op, item, tiles.first, found[tiles.first & 1]);
  for (long tile = tiles.first; tile < tiles.last; ++tile) {
    const KVTile& here = found[tile & 1];
    TileOf next = tile + 1 < tiles.last ? TileOf{&item, tile + 1} : after;
    ahead.clear();
    if (next.item) {
      KVTile& there = found[~tile & 1];
      find_tile(op, *next.item, next.tile, there);
      ahead.begin(op, there, steps_of(rows, op.head_dim));
    }
    switch (op.type) {
      case KVType::kBf16:
        pack_tile<KVType::kBf16>(op, here, s.keys, s.values, s.scales);
        break;
      case KVType::kInt8:
        pack_tile<KVType::kInt8>(op, here, s.keys, s.values, s.scales);
        break;
      case KVType::kFp8:
        pack_tile<KVType::kFp8>(op, here, s.keys, s.values, s.scales);
        break;
    }
    if (is_plain(op))
      attend_tile<true>(op, s, tile, rows, ahead, sums);
    else
      attend_tile<false>(op, s, tile, rows, ahead, sums);
  }
}

// Returns the factor from a row's sum of values to its result. A sink is a logit without a value. It is
// added after all chunks, because the first chunk of an item may be outside the row's range.
inline float result_factor(const Attention& op, long head, float top, float total) {
  if (op.sinks) total += std::exp(op.sinks[head] - top);  // if infinite, the result is 0
  return total == 0.0f ? 1.0f : 1.0f / total;
}

inline void write_rows(const Attention& op, const AttentionItem& item, const SoftmaxSums& sums) {
  long D = op.head_dim, G = op.heads / op.kv_heads;
  for (long i = 0; i < item.rows * G; ++i) {
    long row = op.cu_q_lens[item.seq] + item.first + i / G, head = item.head * G + i % G;
    F16 scale = splat(result_factor(op, head, sums.top[i], sums.total[i]));
    uint16_t* out = op.out + (row * op.heads + head) * D;
    for (long d = 0; d < D; d += 16) store_bf16(out + d, mul(load(sums.out + i * D + d), scale));
  }
}

// Computes all chunks of an item on one thread. `next` is the likely next item.
inline void attend_item(const Attention& op, const AttentionItem& item, const AttentionItem* next) {
  long D = op.head_dim, rows = item.rows * (op.heads / op.kv_heads);
  AttentionScratch s = prepare(op, item);
  float* memory = scratch<float>(6, 2 * SoftmaxSums::size(rows, D));
  SoftmaxSums sums = SoftmaxSums::at(memory, rows);
  SoftmaxSums more = SoftmaxSums::at(memory + SoftmaxSums::size(rows, D), rows);
  for (long c = 0; c < item.chunks; ++c) {
    long chunk = item.first_chunk + c;
    TileOf after = {};
    if (c + 1 < item.chunks)
      after = {&item, tiles_of(op, item, chunk + 1).first};
    else if (next)
      after = {next, tiles_of(op, *next, next->first_chunk).first};
    attend_chunk(op, item, s, chunk, after, c ? more : sums);
    if (c) merge(sums, more, rows, D);
  }
  write_rows(op, item, sums);
}

// Returns items of at most `item_rows` rows, counting the heads of one key/value head.
inline std::vector<AttentionItem> attention_items(const Attention& op, long item_rows) {
  long most = std::max(1L, item_rows / (op.heads / op.kv_heads));
  std::vector<AttentionItem> items;
  for (long seq = 0; seq < op.num_seqs; ++seq) {
    long q_len = op.cu_q_lens[seq + 1] - op.cu_q_lens[seq];
    for (long head = 0; head < op.kv_heads; ++head)
      for (long first = 0; first < q_len; first += most) {
        long rows = std::min(most, q_len - first), keys = kKeys * kChunkTiles;
        long chunk = first_key(op, visible_keys(op, seq, first)) / keys;
        long end = (visible_keys(op, seq, first + rows - 1) + keys - 1) / keys;
        items.push_back({seq, head, first, rows, chunk, std::max(end - chunk, 1L)});
      }
  }
  return items;
}

// Computes the chunks of all items as separate tasks, for a few long contexts on many threads.
inline void attend_in_chunks(xla::ffi::ThreadPool& pool, const Attention& op,
                             const std::vector<AttentionItem>& items) {
  struct Task {
    long item, chunk, offset;
  };
  long D = op.head_dim, G = op.heads / op.kv_heads, size = 0;
  std::vector<Task> tasks;
  std::vector<long> first;  // index of each item's first task
  for (long i = 0; i < long(items.size()); ++i) {
    first.push_back(long(tasks.size()));
    for (long c = 0; c < items[i].chunks; ++c) {
      tasks.push_back({i, items[i].first_chunk + c, size});
      size += SoftmaxSums::size(items[i].rows * G, D);
    }
  }
  float* memory = scratch<float>(7, size);
  auto sums_of = [&](const Task& task) {
    return SoftmaxSums::at(memory + task.offset, items[task.item].rows * G);
  };
  long count = long(tasks.size());
  auto attend = [&](long t) {
    const AttentionItem& item = items[tasks[t].item];
    TileOf after = {};
    if (t + 1 < count) {
      const AttentionItem& next = items[tasks[t + 1].item];
      after = {&next, tiles_of(op, next, tasks[t + 1].chunk).first};
    }
    attend_chunk(op, item, prepare(op, item), tasks[t].chunk, after, sums_of(tasks[t]));
  };
  auto merge_all = [&](long i) {
    const Task* task = &tasks[first[i]];
    SoftmaxSums sums = sums_of(*task);
    for (long c = 1; c < items[i].chunks; ++c)
      merge(sums, sums_of(task[c]), items[i].rows * G, D);
    write_rows(op, items[i], sums);
  };
  Team(pool, count).run(phase(count, attend), phase(long(items.size()), merge_all));
}

inline void run_attention(xla::ffi::ThreadPool& pool, const Attention& op) {
  constexpr long kEach = 4;  // minimum items per thread, so that all finish at about the same time
  long enough = kEach * std::max<long>(1, pool.num_threads());
  std::vector<AttentionItem> items;
  for (long item_rows : kItemRows) {  // more rows per item unpack the cache less often
    items = attention_items(op, item_rows);
    if (long(items.size()) >= enough) break;
  }
  bool is_long = std::any_of(items.begin(), items.end(),
                             [](const AttentionItem& item) { return item.chunks > 1; });
  if (is_long && pool.num_threads() > 1 && long(items.size()) < enough) {
    attend_in_chunks(pool, op, items);
    return;
  }
  long count = long(items.size());
  auto attend = [&](long i) {
    attend_item(op, items[i], i + 1 < count ? &items[i + 1] : nullptr);
  };
  Team(pool, count).run(phase(count, attend));
}

// ---- RoPE and write ---------------------------------------------------------------------------

struct RotateWrite {
  const uint16_t* qkv;  // bf16[T, H + 2K, D]
  const float* cos;     // f32[T, pairs]
  const float* sin;
  const int32_t* slot_mapping;  // [T], not written if at or beyond N * bs
  uint16_t* q;                  // bf16[T, H, D]
  uint16_t* kv;
  long tokens, num_blocks;
  long heads, kv_heads, head_dim, block_size;
  long pairs;        // rotated pairs per head
  bool interleaved;  // pairs are neighbors
};

// Rotates the pairs (i, i + half).
inline void rotate_halves(const uint16_t* x, const float* cos, const float* sin, long half,
                          uint16_t* out) {
  for (long d = 0; d < half; d += 16) {
    long n = half - d;
    if (n >= 16) {
      F16 a = load_bf16(x + d), b = load_bf16(x + half + d), c = load(cos + d), s = load(sin + d);
      store_bf16(out + d, fms(a, c, mul(b, s)));
      store_bf16(out + half + d, fma(b, c, mul(a, s)));
    } else {
      for (long i = d; i < half; ++i) {
        float a = bf16_to_f32(x[i]), b = bf16_to_f32(x[half + i]);
        out[i] = f32_to_bf16(std::fma(a, cos[i], -b * sin[i]));
        out[half + i] = f32_to_bf16(std::fma(b, cos[i], a * sin[i]));
      }
    }
  }
}

// Rotates the pairs (2i, 2i + 1).
inline void rotate_neighbors(const uint16_t* x, const float* cos, const float* sin, long pairs,
                             uint16_t* out) {
  for (long i = 0; i < pairs; ++i) {
    float a = bf16_to_f32(x[2 * i]), b = bf16_to_f32(x[2 * i + 1]);
    out[2 * i] = f32_to_bf16(std::fma(a, cos[i], -b * sin[i]));
    out[2 * i + 1] = f32_to_bf16(std::fma(b, cos[i], a * sin[i]));
  }
}

// Rotates the first numbers of a head and copies the others.
inline void rotate(const RotateWrite& op, const uint16_t* x, const float* cos, const float* sin,
                   uint16_t* out) {
  (op.interleaved ? rotate_neighbors : rotate_halves)(x, cos, sin, op.pairs, out);
  long rotated = 2 * op.pairs;
  if (rotated < op.head_dim) std::memcpy(out + rotated, x + rotated, (op.head_dim - rotated) * 2);
}

inline void run_rotate_write(xla::ffi::ThreadPool& pool, const RotateWrite& op) {
  long H = op.heads, K = op.kv_heads, D = op.head_dim, bs = op.block_size;
  constexpr long kTokens = 16;  // per item
  auto body = [&](long item) {
    for (long t = item * kTokens; t < std::min(op.tokens, (item + 1) * kTokens); ++t) {
      const uint16_t* row = op.qkv + t * (H + 2 * K) * D;
      const float *cos = op.cos + t * op.pairs, *sin = op.sin + t * op.pairs;
      for (long h = 0; h < H; ++h) rotate(op, row + h * D, cos, sin, op.q + (t * H + h) * D);
      long slot = op.slot_mapping[t];
      if (slot < 0 || slot >= op.num_blocks * bs) continue;
      uint16_t* block = op.kv + slot / bs * 2 * K * bs * D + slot % bs * D;
      for (long k = 0; k < K; ++k) {
        rotate(op, row + (H + k) * D, cos, sin, block + k * bs * D);
        std::memcpy(block + (K + k) * bs * D, row + (H + K + k) * D, D * 2);
      }
    }
  };
  long items = (op.tokens + kTokens - 1) / kTokens;
  Team team(pool, items);
  team.run(phase(items, body));
}

}  // namespace forge

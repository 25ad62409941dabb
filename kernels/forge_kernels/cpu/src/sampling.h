// Samples one token per row of logits: argmax, or Gumbel-max over the tokens that pass top-k, top-p and
// min-p.
//
// The result is the same function of (logits, parameters, key) as in sampling/api.py. It has the same
// random bits, and thresholds from the same bisection over the bits of the floats. Logarithms and sums
// may differ in their last place. A row's token depends on that row only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace forge {

struct Sampling {
  const float* logits;       // f32[R, V]
  const float* temperature;  // f32[R], 0: argmax
  const int32_t* top_k;      // i32[R], below 1: off
  const float* top_p;        // f32[R], 1: off
  const float* min_p;        // f32[R], 0: off
  const uint32_t* key;       // u32[R, 2]
  int32_t* token;            // i32[R]
  long rows, vocab;
};

constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline uint32_t order_key(float x) {  // compares in the order of the floats
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
inline float from_order_key(uint32_t key) {
  if (key == 0) return kNothing;
  uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Returns the largest threshold for which `holds` is true; it is monotone and true for the lowest.
template <class F>
float bisect(F&& holds) {
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; --bit) {
    uint32_t candidate = found | 1u << bit;
    if (holds(from_order_key(candidate))) found = candidate;
  }
  return from_order_key(found);
}

// Rows are padded to whole vectors with -inf.
inline float threshold(const float* scaled, long padded, float highest, long vocab, long top_k,
                       float top_p, float min_p, float* mass) {
  float lowest = kNothing;
  if (top_k >= 1 && top_k < vocab) {
    lowest = bisect([&](float t) {
      if (std::isnan(t)) return false;
      long count = 0;
      for (long i = 0; i < padded; i += 16) count += count_at_least(load(scaled + i), t);
      return count >= top_k;
    });
  }
  if (top_p < 1.0f) {
    F16 sums = zero();
    for (long i = 0; i < padded; i += 16) {
      F16 x = load(scaled + i);
      F16 m = keep_at_least(exp(sub(x, splat(highest))), x, lowest);
      store(mass + i, m);
      sums = add(sums, m);
    }
    float wanted = top_p * sum(sums);
    float by_p = bisect([&](float t) {
      if (std::isnan(t)) return false;
      F16 kept = zero();
      for (long i = 0; i < padded; i += 16)
        kept = add(kept, keep_at_least(load(mass + i), load(scaled + i), t));
      return sum(kept) >= wanted;
    });
    // No mass reaches a top_p that underflows, but the most likely token always stays.
    lowest = std::max(lowest, std::min(by_p, highest));
  }
  if (min_p > 0.0f) lowest = std::max(lowest, highest + std::log(min_p));
  return lowest;
}

inline I16 mix(I16 x) {
  x = imul(ixor(x, shift_right<16>(x)), isplat(int32_t(0x7FEB352D)));
  x = imul(ixor(x, shift_right<15>(x)), isplat(int32_t(0x846CA68B)));
  return ixor(x, shift_right<16>(x));
}

inline F16 gumbel(I16 token, uint32_t key0, uint32_t key1) {
  I16 bits = mix(iadd(imul(token, isplat(int32_t(0x9E3779B9))), isplat(int32_t(key0))));
  bits = mix(ixor(bits, isplat(int32_t(key1))));
  F16 uniform = mul(add(to_float(shift_right<9>(bits)), splat(0.5f)), splat(0x1p-23f));
  return sub(zero(), log(sub(zero(), log(uniform))));
}

struct Best {
  float value = kNothing;
  int32_t token = 0;
};

// The largest of a sequence of vectors, with its index; ties go to the first.
class Champion {
 public:
  void offer(F16 value, I16 token) { take_greater(value_, token_, value, token); }
  Best best() const {
    alignas(64) float values[16];
    alignas(64) int32_t tokens[16];
    store(values, value_);
    store_bits(tokens, token_);
    Best best{values[0], tokens[0]};
    for (int i = 1; i < 16; ++i) {
      bool first = values[i] == best.value && tokens[i] < best.token;
      if (values[i] > best.value || first) best = {values[i], tokens[i]};
    }
    return best;
  }

 private:
  F16 value_ = splat(kNothing);
  I16 token_ = izero();
};

inline I16 token_range(long first) {
  alignas(64) static const int32_t lanes[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};
  return iadd(load_bits(lanes), isplat(int32_t(first)));
}

inline Best search(const Sampling& op, long row, float lowest, long first, long last) {
  const float* logits = op.logits + row * op.vocab;
  float temperature = op.temperature[row];
  F16 divisor = splat(temperature);
  uint32_t key0 = op.key[2 * row], key1 = op.key[2 * row + 1];
  Champion champion;
  for (long i = first; i < last; i += 16) {
    F16 x = i + 16 <= op.vocab ? load(logits + i) : load_first(logits + i, int(op.vocab - i));
    I16 token = token_range(i);
    if (temperature > 0.0f) {
      x = div(x, divisor);
      F16 noisy = add(x, gumbel(token, key0, key1));
      x = lowest == kNothing ? noisy : mask_below(noisy, x, lowest);
    }
    champion.offer(x, token);
  }
  return champion.best();
}

inline void run_sampling(xla::ffi::ThreadPool& pool, const Sampling& op) {
  constexpr long kChunk = 8192;  // tokens per item
  long chunks = (op.vocab + kChunk - 1) / kChunk, padded = (op.vocab + 15) / 16 * 16;
  std::vector<float> lowest(op.rows, kNothing);
  std::vector<Best> bests(op.rows * chunks);
  std::vector<long> filtered;
  for (long row = 0; row < op.rows; ++row) {
    bool filters = (op.top_k[row] >= 1 && op.top_k[row] < op.vocab) || op.top_p[row] < 1.0f ||
                   op.min_p[row] > 0.0f;
    if (op.temperature[row] > 0.0f && filters) filtered.push_back(row);
  }
  auto find_threshold = [&](long item) {
    long row = filtered[item];
    float* scaled = scratch<float>(0, padded);
    float* mass = scratch<float>(1, padded);
    F16 highest = splat(kNothing), divisor = splat(op.temperature[row]);
    for (long i = 0; i < padded; i += 16) {
      const float* logits = op.logits + row * op.vocab + i;
      F16 x = i + 16 <= op.vocab ? load(logits) : load_first(logits, int(op.vocab - i));
      x = div(x, divisor);
      store(scaled + i, x);
      highest = max(highest, x);
    }
    lowest[row] = threshold(scaled, padded, maximum(highest), op.vocab, op.top_k[row],
                            op.top_p[row], op.min_p[row], mass);
  };
  auto search_chunk = [&](long item) {
    long row = item / chunks, first = item % chunks * kChunk;
    bests[item] = search(op, row, lowest[row], first, std::min(first + kChunk, op.vocab));
  };
  Team team(pool, op.rows * chunks);
  if (filtered.empty()) {
    team.run(phase(op.rows * chunks, search_chunk));
  } else {
    team.run(phase(long(filtered.size()), find_threshold), phase(op.rows * chunks, search_chunk));
  }
  for (long row = 0; row < op.rows; ++row) {
    Best best = bests[row * chunks];
    for (long c = 1; c < chunks; ++c)
      if (bests[row * chunks + c].value > best.value) best = bests[row * chunks + c];
    op.token[row] = std::min<int32_t>(best.token, int32_t(op.vocab - 1));
  }
}

}  // namespace forge

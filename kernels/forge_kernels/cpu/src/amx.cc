// Products in AMX tiles (tiles.h). Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tiles.h"

// Older compilers may come with an assembler that lacks the instructions.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11

#include "tile_instructions.h"

namespace forge {

bool request_tiles() { return permit_tiles(); }

namespace {

constexpr long kStepBytes = kTileWords * 128;  // of a panel: 16 words of 32 columns

enum class Weights { kBf16, kU8, kS8 };

// `first` rows in the upper tiles, `second` rows in the lower ones, and `words` along k.
void configure(long first, long second, long words) {
  TileConfig config;
  auto set = [&](int tile, long rows, long row_words) {
    config.rows[tile] = uint8_t(rows);
    config.row_bytes[tile] = uint8_t(rows ? 4 * row_words : 0);
  };
  for (int tile : {0, 1}) set(tile, first, 16);
  for (int tile : {2, 3}) set(tile, second, 16);
  set(4, first, words);
  set(5, second, words);
  for (int tile : {6, 7}) set(tile, words, 16);
  tile_configure(config);
}

template <Weights weights, int sum, int a, int b>
inline void dot() {
  if constexpr (weights == Weights::kBf16) tile_dot_bf16<sum, a, b>();
  if constexpr (weights == Weights::kU8) tile_dot_s8u8<sum, a, b>();
  if constexpr (weights == Weights::kS8) tile_dot_s8s8<sum, a, b>();
}

template <bool lower>
inline void begin() {
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (lower) {
    tile_zero<2>();
    tile_zero<3>();
  }
}

// Multiplies as many words of k as tiles have.
template <Weights weights, bool lower>
inline void step(const uint32_t* upper_x, const uint32_t* lower_x, const uint8_t* w) {
  tile_load<6>(w, 128);
  tile_load<7>(w + 64, 128);
  tile_load<4>(upper_x, 64);
  dot<weights, 0, 4, 6>();
  dot<weights, 1, 4, 7>();
  if constexpr (lower) {
    tile_load<5>(lower_x, 64);
    dot<weights, 2, 5, 6>();
    dot<weights, 3, 5, 7>();
  }
}

template <bool lower>
inline void end(uint32_t (&sums)[kTileRowsTogether][32]) {
  tile_store<0>(&sums[0][0], 128);
  tile_store<1>(&sums[0][16], 128);
  if constexpr (lower) {
    tile_store<2>(&sums[kTileRows][0], 128);
    tile_store<3>(&sums[kTileRows][16], 128);
  }
}

// Prefetches the lines of a step.
inline void prefetch(const char*& ahead, long& ahead_lines) {
  long lines = std::min(ahead_lines, kStepBytes / 64);
  for (long i = 0; i < lines; ++i) __builtin_prefetch(ahead + 64 * i);
  ahead += 64 * lines;
  ahead_lines -= lines;
}

struct Block {
  long row, first, second;  // rows in the upper tiles from `row` on, and in the lower ones
  const char* ahead;
  long ahead_lines;
};

// Multiplies the rows of a block, which has lower tiles if `lower`. If the weights are not a multiple
// of a step, `tail` is the last step, else null.
template <Weights weights, bool lower>
void multiply_block(const TileProduct& product, Block block, const uint8_t* tail,
                    TileSums* sums) {
  long whole = product.words / kTileWords, steps = whole + (tail ? 1 : 0);
  const uint32_t* x = product.x + block.row * steps * kTileWords;
  const uint32_t* below = x + steps * block.first * kTileWords;
  begin<lower>();
  for (long s = 0; s < steps; ++s) {
    step<weights, lower>(x + s * block.first * kTileWords, below + s * block.second * kTileWords,
                         s < whole ? product.w + s * kStepBytes : tail);
    prefetch(block.ahead, block.ahead_lines);
  }
  end<lower>(sums[0]);
  product.write(product.context, block.row, block.first + block.second, 0, sums);
}

// Does the same with separate sums of each group of words.
template <Weights weights, bool lower>
void multiply_groups(const TileProduct& product, Block block, const uint8_t*, TileSums* sums) {
  long steps = (product.words + kTileWords - 1) / kTileWords;
  const uint32_t* x = product.x + block.row * steps * kTileWords;
  const uint32_t* below = x + steps * block.first * kTileWords;
  for (long s = 0; s < steps; ++s) {
    long words = std::min(kTileWords, product.words - s * kTileWords);
    TileSums* out = sums;
    for (long word = 0; word < words; word += product.group, ++out) {
      begin<lower>();
      step<weights, lower>(x + word, below + word, product.w + s * kStepBytes + word * 128);
      end<lower>(*out);
    }
    x += block.first * kTileWords;
    below += block.second * kTileWords;
    prefetch(block.ahead, block.ahead_lines);
    product.write(product.context, block.row, block.first + block.second, s, sums);
  }
}

template <Weights weights>
void multiply(const TileProduct& product) {
  alignas(64) TileSums sums[kTileGroups];
  alignas(64) uint8_t tail[kStepBytes] = {};
  long left = product.group ? 0 : product.words % kTileWords;
  if (left)
    std::memcpy(tail, product.w + product.words / kTileWords * kStepBytes, left * 128);
  const char* ahead = product.ahead;
  long lines = product.ahead_lines, configured = 0;
  for (long row = 0; row < product.rows; row += kTileRowsTogether) {
    long rows = std::min(kTileRowsTogether, product.rows - row);
    long first = std::min(rows, kTileRows), second = rows - first;
    if (rows != configured) configure(first, second, product.group ? product.group : kTileWords);
    configured = rows;
    long blocks = (product.rows - row + kTileRowsTogether - 1) / kTileRowsTogether;
    long share = (lines + blocks - 1) / blocks;
    auto multiply = product.group
                        ? second ? multiply_groups<weights, true> : multiply_groups<weights, false>
                        : second ? multiply_block<weights, true> : multiply_block<weights, false>;
    multiply(product, {row, first, second, ahead, share}, left ? tail : nullptr, sums);
    ahead += 64 * share;
    lines -= share;
  }
  tile_release();
}

}  // namespace

void multiply_tiles_bf16(const TileProduct& product) { multiply<Weights::kBf16>(product); }
void multiply_tiles_u8(const TileProduct& product) { multiply<Weights::kU8>(product); }
void multiply_tiles_s8(const TileProduct& product) { multiply<Weights::kS8>(product); }

}  // namespace forge

#else

namespace forge {

bool request_tiles() { return false; }
void multiply_tiles_bf16(const TileProduct&) { std::abort(); }
void multiply_tiles_u8(const TileProduct&) { std::abort(); }
void multiply_tiles_s8(const TileProduct&) { std::abort(); }

}  // namespace forge

#endif

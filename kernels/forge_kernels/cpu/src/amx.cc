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

// `first` rows in the upper tiles, `second` rows in the lower ones.
void configure(long first, long second) {
  TileConfig config;
  auto set = [&](int tile, long rows) {
    config.rows[tile] = uint8_t(rows);
    config.row_bytes[tile] = rows ? 64 : 0;
  };
  for (int tile : {0, 1, 4}) set(tile, first);
  for (int tile : {2, 3, 5}) set(tile, second);
  for (int tile : {6, 7}) set(tile, kTileWords);
  tile_configure(config);
}

template <bool integer, int sum, int a, int b>
inline void dot() {
  if constexpr (integer) {
    tile_dot_s8u8<sum, a, b>();
  } else {
    tile_dot_bf16<sum, a, b>();
  }
}

// Multiplies 16 words of k.
template <bool integer, bool lower>
inline void step(const uint32_t* upper_x, const uint32_t* lower_x, const uint8_t* w) {
  tile_load<6>(w, 128);
  tile_load<7>(w + 64, 128);
  tile_load<4>(upper_x, 64);
  dot<integer, 0, 4, 6>();
  dot<integer, 1, 4, 7>();
  if constexpr (lower) {
    tile_load<5>(lower_x, 64);
    dot<integer, 2, 5, 6>();
    dot<integer, 3, 5, 7>();
  }
}

// Multiplies `first` rows, and `second` rows after them if `lower`. If the weights are not a multiple
// of a step, `tail` is the last step, else null.
template <bool integer, bool lower>
void multiply_block(const TileProduct& product, const uint32_t* x, long first, long second,
                    const uint8_t* tail, const char* ahead, long ahead_lines,
                    uint32_t (&sums)[kTileRowsTogether][32]) {
  long whole = product.words / kTileWords, steps = whole + (tail ? 1 : 0);
  const uint32_t* below = x + steps * first * kTileWords;
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (lower) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (long s = 0; s < steps; ++s) {
    step<integer, lower>(x + s * first * kTileWords, below + s * second * kTileWords,
                         s < whole ? product.w + s * kStepBytes : tail);
    long lines = std::min(ahead_lines, kStepBytes / 64);
    for (long i = 0; i < lines; ++i) __builtin_prefetch(ahead + 64 * i);
    ahead += 64 * lines;
    ahead_lines -= lines;
  }
  tile_store<0>(&sums[0][0], 128);
  tile_store<1>(&sums[0][16], 128);
  if constexpr (lower) {
    tile_store<2>(&sums[kTileRows][0], 128);
    tile_store<3>(&sums[kTileRows][16], 128);
  }
}

template <bool integer>
void multiply(const TileProduct& product) {
  alignas(64) uint32_t sums[kTileRowsTogether][32];
  alignas(64) uint8_t tail[kStepBytes] = {};
  long left = product.words % kTileWords;
  long steps = product.words / kTileWords + (left ? 1 : 0);
  if (left)
    std::memcpy(tail, product.w + (steps - 1) * kStepBytes, left * 128);
  const char* ahead = product.ahead;
  long lines = product.ahead_lines, configured = 0;
  for (long row = 0; row < product.rows; row += kTileRowsTogether) {
    long rows = std::min(kTileRowsTogether, product.rows - row);
    long first = std::min(rows, kTileRows), second = rows - first;
    if (rows != configured) configure(first, second);
    configured = rows;
    long blocks = (product.rows - row + kTileRowsTogether - 1) / kTileRowsTogether;
    long share = (lines + blocks - 1) / blocks;
    auto multiply = second ? multiply_block<integer, true> : multiply_block<integer, false>;
    multiply(product, product.x + row * steps * kTileWords, first, second, left ? tail : nullptr,
             ahead, share, sums);
    ahead += 64 * share;
    lines -= share;
    product.write(product.context, row, rows, sums);
  }
  tile_release();
}

}  // namespace

void multiply_tiles_bf16(const TileProduct& product) { multiply<false>(product); }
void multiply_tiles_int8(const TileProduct& product) { multiply<true>(product); }

}  // namespace forge

#else

namespace forge {

bool request_tiles() { return false; }
void multiply_tiles_bf16(const TileProduct&) { std::abort(); }
void multiply_tiles_int8(const TileProduct&) { std::abort(); }

}  // namespace forge

#endif

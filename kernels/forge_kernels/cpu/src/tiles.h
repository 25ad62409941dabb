// Products of packed rows with a panel of weights in AMX tiles: 32 rows times 32 columns at a time.
//
// A panel of formats.h already has the layout of tiles of weights: 16 words of k, each with 16 columns
// of a panel of 32. The result for a row depends only on that row and the weights, not on the number of
// rows. For bfloat16, each 32 values of k are summed separately, even and odd ones apart, and then
// added (the order of TDPBF16PS). The bits therefore differ from those of the row kernels. Integer sums
// are the same.
#pragma once

#include <cstdint>

namespace forge {

constexpr long kTileRows = 16;
constexpr long kTileWords = 16;        // words of 4 bytes along k, per row of a tile
constexpr long kTileRowsTogether = 32;  // 2 x 2 tiles of sums
constexpr long kTileGroups = 4;         // the most groups in as many words as a tile has

using TileSums = uint32_t[kTileRowsTogether][32];

struct TileProduct {
  // For each 16 rows, [steps][rows][16]: words along k, padded with zeros.
  const uint32_t* x;
  const uint8_t* w;   // [words][32][4]
  long rows, words;   // words per row of x
  long group;         // words that are summed: a divisor of 16 from 4 on, or 0 for all
  const char* ahead;  // `ahead_lines` lines from here on are prefetched
  long ahead_lines;
  // Receives float32 or int32[groups, 32, 32] of the rows from `row` on. With groups, the sums are of 16
  // words, number `step`.
  void (*write)(void* context, long row, long rows, long step, const void* sums);
  void* context;
};

// Requests permission to use tiles. Returns false if they cannot be used.
bool request_tiles();

void multiply_tiles_bf16(const TileProduct& product);
// Multiplies s8 by u8, or by s8.
void multiply_tiles_u8(const TileProduct& product);
void multiply_tiles_s8(const TileProduct& product);

}  // namespace forge

// Products of packed rows with a panel of weights in AMX tiles: 32 rows times 32 columns at a time.
//
// A panel of linear.h already is what a tile of weights is: 16 words of k, each with 16 columns of a
// panel of 32. What comes out for a row depends on that row and the weights alone, whatever the number
// of rows. Of bfloat16 each 32 values of k are summed by themselves, even and odd ones apart, and
// then added (the order of TDPBF16PS), so the bits are others than those of the row kernels. Sums of
// integers are the same.
#pragma once

#include <cstdint>

namespace forge {

constexpr long kTileRows = 16;
constexpr long kTileWords = 16;        // of 4 bytes along k, a row of a tile
constexpr long kTileRowsTogether = 32;  // 2 x 2 tiles of sums

struct TileProduct {
  const uint32_t* x;  // of each 16 rows [steps][rows][16]: words along k, with zeros at the end
  const uint8_t* w;   // [words][32][4]
  long rows, words;   // of a row of x
  const char* ahead;  // read into the cache meanwhile, so many lines of it
  long ahead_lines;
  // Is given float32 or int32[rows, 32], of the rows from `row` on.
  void (*write)(void* context, long row, long rows, const void* sums);
  void* context;
};

// Asks the system for tiles. False: they cannot be used.
bool request_tiles();

void multiply_tiles_bf16(const TileProduct& product);
void multiply_tiles_int8(const TileProduct& product);

}  // namespace forge

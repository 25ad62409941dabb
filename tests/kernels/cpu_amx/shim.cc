// The part of amx.cc that `test_cpu_amx.py` calls: a product of packed rows and one panel.

#include <algorithm>
#include <cstring>

#include "tiles.h"

// `group` is the number of words in a sum, or 0 for all: out[groups, rows, 32]. The element type of
// weights is bfloat16 (0), u8 (1) or s8 (2).
extern "C" void multiply(const uint32_t* x, const uint8_t* w, long rows, long words, long group,
                         int type, uint32_t* out) {
  struct Context {
    long rows, words, group;
    uint32_t* out;
  } context{rows, words, group, out};
  forge::TileProduct product{};
  product.x = x;
  product.w = w;
  product.rows = rows;
  product.words = words;
  product.group = group;
  product.context = &context;
  product.write = [](void* context, long row, long rows, long step, const void* sums) {
    const Context& c = *static_cast<const Context*>(context);
    long at = 0, groups = 1;
    if (c.group) {
      at = step * forge::kTileWords / c.group;
      groups = std::min(forge::kTileWords, c.words - step * forge::kTileWords) / c.group;
    }
    auto* from = static_cast<const forge::TileSums*>(sums);
    for (long g = 0; g < groups; ++g)
      std::memcpy(c.out + 32 * ((at + g) * c.rows + row), from[g], rows * 32 * 4);
  };
  decltype(&forge::multiply_tiles_bf16) of[] = {
      forge::multiply_tiles_bf16, forge::multiply_tiles_u8, forge::multiply_tiles_s8};
  of[type](product);
}

// The part of amx.cc that `test_cpu_amx.py` calls: a product of packed rows and one panel.

#include <cstring>

#include "tiles.h"

extern "C" void multiply(const uint32_t* x, const uint8_t* w, long rows, long words, int is_int8,
                         uint32_t* out) {
  forge::TileProduct product{};
  product.x = x;
  product.w = w;
  product.rows = rows;
  product.words = words;
  product.context = out;
  product.write = [](void* context, long row, long rows, const void* sums) {
    std::memcpy(static_cast<uint32_t*>(context) + 32 * row, sums, rows * 32 * 4);
  };
  (is_int8 ? forge::multiply_tiles_int8 : forge::multiply_tiles_bf16)(product);
}

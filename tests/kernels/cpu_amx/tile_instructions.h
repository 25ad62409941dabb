// The AMX instructions in software, to the bit; replaces the header of this name. Each operation
// follows Intel's Software Developer's Manual, volume 2. A use that would raise an exception on a
// CPU ends the process.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace forge {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "as ldtilecfg reads it");

struct TileRegisters {
  bool configured = false;
  TileConfig config;
  uint8_t data[8][16][64];
};
inline TileRegisters& tile_registers() {
  static thread_local TileRegisters registers;
  return registers;
}
inline void tile_require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}
inline TileRegisters& tile_in_use(int tile) {
  TileRegisters& r = tile_registers();
  tile_require(r.configured, "an instruction without a configuration");
  tile_require(r.config.rows[tile] > 0, "a tile that is not configured");
  return r;
}

inline bool permit_tiles() { return true; }

inline void tile_configure(const TileConfig& config) {
  TileRegisters& r = tile_registers();
  tile_require(config.palette == 1 && config.start_row == 0, "a palette that there is not");
  for (uint8_t byte : config.reserved) tile_require(byte == 0, "a reserved byte");
  for (int t = 0; t < 16; ++t) {
    tile_require(t < 8 || (!config.rows[t] && !config.row_bytes[t]), "a tile that there is not");
    tile_require(config.rows[t] <= 16 && config.row_bytes[t] <= 64, "a tile that is too large");
    tile_require(!config.rows[t] == !config.row_bytes[t], "rows without columns, or the reverse");
  }
  r.configured = true;
  r.config = config;
  std::memset(r.data, 0, sizeof r.data);
}
inline void tile_release() { tile_registers() = TileRegisters{}; }

template <int tile>
void tile_zero() {
  std::memset(tile_in_use(tile).data[tile], 0, sizeof tile_registers().data[tile]);
}
template <int tile>
void tile_load(const void* from, long stride) {
  TileRegisters& r = tile_in_use(tile);
  std::memset(r.data[tile], 0, sizeof r.data[tile]);
  for (int row = 0; row < r.config.rows[tile]; ++row)
    std::memcpy(r.data[tile][row], static_cast<const char*>(from) + row * stride,
                r.config.row_bytes[tile]);
}
template <int tile>
void tile_store(void* to, long stride) {
  TileRegisters& r = tile_in_use(tile);
  for (int row = 0; row < r.config.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, r.data[tile][row],
                r.config.row_bytes[tile]);
}

template <int sum, int a, int b>
TileRegisters& tile_product() {
  static_assert(sum != a && sum != b && a != b, "operands are different tiles");
  tile_in_use(sum);
  tile_in_use(a);
  TileRegisters& r = tile_in_use(b);
  const TileConfig& c = r.config;
  bool fits = c.rows[sum] == c.rows[a] && c.row_bytes[sum] == c.row_bytes[b] &&
              c.row_bytes[a] == 4 * c.rows[b] && c.row_bytes[sum] % 4 == 0;
  tile_require(fits, "tiles that do not fit together");
  return r;
}

inline float tile_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// Flushes subnormal numbers to zero, on input and output, for any MXCSR.
inline float tile_flush(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
inline float tile_fma(float a, float b, float c) {
  a = tile_flush(a), b = tile_flush(b), c = tile_flush(c);
  float sum = std::fma(a, b, c);
  // A result that is below the normal range after rounding to 24 bits also becomes zero. Rounded as
  // a subnormal number, it could be a normal one.
  double wide = double(a) * double(b) + double(c);
  if (std::fabs(sum) == 0x1p-126f && std::fabs(wide) < 0x1p-126 - 0x1p-151) sum = std::copysign(0.0f, sum);
  return tile_flush(sum);
}
inline float tile_add(float a, float b) { return tile_flush(tile_flush(a) + tile_flush(b)); }

// TDPBF16PS: sums the even and the odd values of k separately from zero, by FMAs in the order of k.
// Then it adds the two sums, and adds the result to the accumulator.
template <int sum, int a, int b>
void tile_dot_bf16() {
  TileRegisters& r = tile_product<sum, a, b>();
  for (int m = 0; m < r.config.rows[sum]; ++m) {
    float even[16] = {}, odd[16] = {}, was[16];
    for (int k = 0; k < r.config.row_bytes[a] / 4; ++k) {
      uint32_t x, w[16];
      std::memcpy(&x, r.data[a][m] + 4 * k, 4);
      std::memcpy(w, r.data[b][k], 64);
      for (int n = 0; n < r.config.row_bytes[sum] / 4; ++n) {
        even[n] = tile_fma(tile_float(x << 16), tile_float(w[n] << 16), even[n]);
        odd[n] = tile_fma(tile_float(x & 0xffff0000), tile_float(w[n] & 0xffff0000), odd[n]);
      }
    }
    std::memcpy(was, r.data[sum][m], 64);
    for (int n = 0; n < r.config.row_bytes[sum] / 4; ++n)
      was[n] = tile_add(was[n], tile_add(even[n], odd[n]));
    std::memcpy(r.data[sum][m], was, 64);
  }
}

// Products with s8 weights, so that tests can see that tiles are used.
inline std::atomic<long> tile_products_s8{0};
extern "C" __attribute__((used)) inline long emulated_products_s8() { return tile_products_s8; }

// TDPBSUD and TDPBSSD: s8 times W (u8 or s8), in 32-bit integers that wrap around.
template <class W, int sum, int a, int b>
void tile_dot_bytes() {
  TileRegisters& r = tile_product<sum, a, b>();
  for (int m = 0; m < r.config.rows[sum]; ++m) {
    uint32_t sums[16];
    std::memcpy(sums, r.data[sum][m], 64);
    for (int k = 0; k < r.config.row_bytes[a] / 4; ++k)
      for (int n = 0; n < r.config.row_bytes[sum] / 4; ++n)
        for (int i = 0; i < 4; ++i)
          sums[n] += uint32_t(int(int8_t(r.data[a][m][4 * k + i])) * int(W(r.data[b][k][4 * n + i])));
    std::memcpy(r.data[sum][m], sums, 64);
  }
}
template <int sum, int a, int b>
void tile_dot_s8u8() {
  tile_dot_bytes<uint8_t, sum, a, b>();
}
template <int sum, int a, int b>
void tile_dot_s8s8() {
  ++tile_products_s8;
  tile_dot_bytes<int8_t, sum, a, b>();
}

}  // namespace forge

// The instructions of AMX in assembly. Compilers need no flag, and do not move code across them.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace forge {

// The shape of each tile, bytes per row and rows: 64 bytes, as `ldtilecfg` reads them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Returns true if the CPU has tiles with bfloat16 and int8, and Linux lets this process use them. Linux
// then reserves 8 KiB more for each thread's registers.
inline bool permit_tiles() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBf16 | kTile | kInt8;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

inline void tile_configure(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
inline void tile_release() { asm volatile("tilerelease" : : : "memory"); }

template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile) : "memory");
}
template <int tile>
inline void tile_load(const void* from, long stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void tile_store(void* to, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// Adds a x b to `sum`, with pairs of bfloat16.
template <int sum, int a, int b>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b) : "memory");
}
// Does the same with groups of four s8 in a and u8 in b.
template <int sum, int a, int b>
inline void tile_dot_s8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b) : "memory");
}
// Does the same with s8 in both.
template <int sum, int a, int b>
inline void tile_dot_s8s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b) : "memory");
}

}  // namespace forge

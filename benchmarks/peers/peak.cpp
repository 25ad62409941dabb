// Measures the peak rate of one multiply-add instruction, in registers or tiles, over all threads.
//
//   peak                 prints the names that this build has, one per line.
//   peak NAME THREADS    prints operations/s; a product and its sum count as two.
//   peak read THREADS    prints bytes/s, read from uncached memory.
//
// Compile it with -march=native, because the build's instruction sets determine the names.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

struct Kernel {
  const char* name;
  double operations;          // operations per round
  void (*spin)(long rounds);  // runs in one thread
};

// Accumulators are separate variables, because GCC keeps those of an array in memory. Inline
// assembly reads and writes each after its step. The compiler thus neither drops a step nor moves
// it out of the loop.
#define TIMES_12(DO) \
  DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define TIMES_24(DO) \
  TIMES_12(DO) DO(12) DO(13) DO(14) DO(15) DO(16) DO(17) DO(18) DO(19) DO(20) DO(21) DO(22) DO(23)
#define DECLARE(i) auto a##i = start;
#define ADVANCE(i) \
  a##i = STEP(a##i); \
  __asm__ volatile("" : "+v"(a##i));
#define SPIN(TIMES) \
  TIMES(DECLARE) \
  for (long r = 0; r < rounds; ++r) { \
    TIMES(ADVANCE) \
  }

#ifdef __AVX512F__
#define STEP(a) _mm512_fmadd_ps(x, x, a)
void f32_avx512(long rounds) {
  const __m512 x = _mm512_set1_ps(1e-3f), start = _mm512_setzero_ps();
  SPIN(TIMES_24)
}
#undef STEP
#endif
#if defined(__AVX2__) && defined(__FMA__)
#define STEP(a) _mm256_fmadd_ps(x, x, a)
void f32_avx2(long rounds) {
  const __m256 x = _mm256_set1_ps(1e-3f), start = _mm256_setzero_ps();
  SPIN(TIMES_12)
}
#undef STEP
#endif
#ifdef __AVX512BF16__
#define STEP(a) _mm512_dpbf16_ps(a, x, x)
void bf16_avx512(long rounds) {
  const __m512 small = _mm512_set1_ps(1e-3f), start = _mm512_setzero_ps();
  const __m512bh x = _mm512_cvtne2ps_pbh(small, small);
  SPIN(TIMES_24)
}
#undef STEP
#endif
#ifdef __AVX512VNNI__
#define STEP(a) _mm512_dpbusd_epi32(a, x, x)
void int8_avx512(long rounds) {
  const __m512i x = _mm512_set1_epi8(3), start = _mm512_setzero_si512();
  SPIN(TIMES_24)
}
#undef STEP
#endif
#ifdef __AVXVNNI__
#define STEP(a) _mm256_dpbusd_avx_epi32(a, x, x)
void int8_avx_vnni(long rounds) {
  const __m256i x = _mm256_set1_epi8(3), start = _mm256_setzero_si256();
  SPIN(TIMES_12)
}
#undef STEP
#endif
#ifdef __AVX2__
__attribute__((always_inline)) inline __m256i dot_avx2(__m256i a, __m256i x, __m256i ones) {
  __asm__ volatile("" : "+v"(x));  // keeps the constant products in the loop
  return _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), ones));
}

#define STEP(a) dot_avx2(a, x, ones)
void int8_avx2(long rounds) {
  const __m256i x = _mm256_set1_epi8(3), start = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  SPIN(TIMES_12)
}
#undef STEP

// Products of 4-bit weights can be summed in 16 bits, and be widened once for many of them.
__attribute__((always_inline)) inline __m256i dot4_avx2(__m256i a, __m256i x) {
  __asm__ volatile("" : "+v"(x));
  return _mm256_add_epi16(a, _mm256_maddubs_epi16(x, x));
}

#define STEP(a) dot4_avx2(a, x)
void int4_avx2(long rounds) {
  const __m256i x = _mm256_set1_epi8(3), start = _mm256_setzero_si256();
  SPIN(TIMES_12)
}
#undef STEP
#endif

#ifdef __AMX_TILE__
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void load_tile_config() {
  static const TileConfig config;
  // The whole structure is an input, but GCC's `_tile_loadconfig` does not declare it (PR 114098).
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

bool may_use_tiles() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

// Four accumulators (tiles 0 to 3) hide the latency of a tile's product.
#define SPIN_TILES(DOT) \
  load_tile_config(); \
  _tile_zero(0); _tile_zero(1); \
  _tile_zero(2); _tile_zero(3); \
  _tile_zero(4); _tile_zero(5); \
  _tile_zero(6); _tile_zero(7); \
  for (long r = 0; r < rounds; ++r) { \
    DOT(0, 4, 6); DOT(1, 4, 7); \
    DOT(2, 5, 6); DOT(3, 5, 7); \
  } \
  _tile_release();
#endif
#ifdef __AMX_BF16__
void bf16_amx(long rounds) { SPIN_TILES(_tile_dpbf16ps) }
#endif
#ifdef __AMX_INT8__
void int8_amx(long rounds) { SPIN_TILES(_tile_dpbssd) }
#endif

const std::vector<Kernel> kKernels = {
#ifdef __AVX512F__
    {"f32_avx512", 24 * 16 * 2, f32_avx512},
#endif
#if defined(__AVX2__) && defined(__FMA__)
    {"f32_avx2", 12 * 8 * 2, f32_avx2},
#endif
#ifdef __AVX512BF16__
    {"bf16_avx512", 24 * 32 * 2, bf16_avx512},
#endif
#ifdef __AVX512VNNI__
    {"int8_avx512", 24 * 64 * 2, int8_avx512},
#endif
#ifdef __AVXVNNI__
    {"int8_avx_vnni", 12 * 32 * 2, int8_avx_vnni},
#endif
#ifdef __AVX2__
    {"int8_avx2", 12 * 32 * 2, int8_avx2},
    {"int4_avx2", 12 * 32 * 2, int4_avx2},
#endif
#ifdef __AMX_BF16__
    {"bf16_amx", 4 * 16 * 16 * 32 * 2, bf16_amx},
#endif
#ifdef __AMX_INT8__
    {"int8_amx", 4 * 16 * 16 * 64 * 2, int8_amx},
#endif
};

// Returns the longest time of `threads` threads that start `work(thread)` at the same time.
template <class Work>
double seconds(int threads, Work work) {
  std::atomic<int> waiting{threads};
  std::vector<std::thread> pool;
  std::vector<double> taken(threads);
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      --waiting;
      while (waiting > 0) {
      }
      const auto begin = std::chrono::steady_clock::now();
      work(t);
      const auto end = std::chrono::steady_clock::now();
      taken[t] = std::chrono::duration<double>(end - begin).count();
    });
  }
  for (auto& thread : pool) thread.join();
  return *std::max_element(taken.begin(), taken.end());
}

typedef uint64_t Line __attribute__((vector_size(64)));

void read_lines(const Line* lines, size_t count) {
  constexpr size_t kAhead = 32, kAtOnce = 8;
  Line sums[kAtOnce] = {};
  for (size_t i = 0; i < count; i += kAtOnce) {
#pragma GCC unroll 8
    for (size_t j = 0; j < kAtOnce; ++j) {
      __builtin_prefetch(lines + i + j + kAhead);
      sums[j] += lines[i + j];
    }
  }
  for (auto& sum : sums) __asm__ volatile("" : : "m"(sum));
}

double bytes_per_second(int threads) {
  const size_t count = (size_t{512} << 20) / sizeof(Line) / threads & ~size_t{63};
  std::vector<Line*> shares(threads);
  for (auto& share : shares) {
    share = static_cast<Line*>(std::aligned_alloc(4096, count * sizeof(Line)));
    if (share == nullptr) return 0;
    std::memset(share, 1, count * sizeof(Line));
  }
  double best = 1e9;
  for (int i = 0; i < 7; ++i) {
    best = std::min(best, seconds(threads, [&](int t) { read_lines(shares[t], count); }));
  }
  for (auto* share : shares) std::free(share);
  return count * sizeof(Line) * threads / best;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    for (const auto& kernel : kKernels) std::puts(kernel.name);
    return 0;
  }
#ifdef __AMX_TILE__
  if (std::strstr(argv[1], "amx") != nullptr && !may_use_tiles()) {
    std::fputs("the kernel does not let this process use AMX\n", stderr);
    return 1;
  }
#endif
  const int threads = std::atoi(argv[2]);
  if (std::strcmp(argv[1], "read") == 0) {
    std::printf("%.6g\n", bytes_per_second(threads));
    return 0;
  }
  for (const auto& kernel : kKernels) {
    if (std::strcmp(kernel.name, argv[1]) != 0) continue;
    long rounds = 1000;
    const auto spin = [&](int) { kernel.spin(rounds); };
    while (seconds(threads, spin) < 0.02) rounds *= 4;
    double best = 1e9;
    for (int i = 0; i < 7; ++i) best = std::min(best, seconds(threads, spin));
    std::printf("%.6g\n", kernel.operations * rounds * threads / best);
    return 0;
  }
  std::fprintf(stderr, "no such instruction in this build: %s\n", argv[1]);
  return 1;
}

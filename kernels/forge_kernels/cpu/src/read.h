// Reads matrices from files and packs them, with several threads. The only memory is the result and a
// piece per thread, which stays in its cache.
#pragma once

#include <cerrno>
#include <unistd.h>

#include "pack.h"

namespace forge {

enum class Stored { kBf16 = 0, kF16 = 1, kF32 = 2 };

// Consecutive rows of a matrix in a file. This struct and the next one must match `linear/files.py`.
struct Stretch {
  int64_t file;  // its descriptor
  int64_t type;  // type of the numbers: Stored
  int64_t offset;
  int64_t rows;
};

constexpr int64_t kPlain = -1;  // instead of a Format: bytes are copied unchanged

struct MatrixInFiles {
  int64_t rows;
  int64_t columns;  // for a plain matrix: bytes per row
  int64_t paired, format;
  uint8_t* out;
  uint8_t* scale;
  int64_t scale_columns;
  int64_t first_stretch;
  int64_t step;      // per item: panels, or rows of a plain matrix
  int64_t last_item;  // items of this matrix and all before it
};

struct Progress {
  int64_t next;   // item
  int64_t fault;  // -1, or the stretch that could not be read
  int64_t error;  // its errno, or 0 if the file ends too early
};

// Reads `bytes` bytes. Returns 0, an errno, or -1 for the end of the file.
inline int read_fully(int file, uint8_t* out, size_t bytes, int64_t at) {
  while (bytes) {
    ssize_t got = pread(file, out, bytes, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return -1;
    out += got;
    bytes -= size_t(got);
    at += got;
  }
  return 0;
}

// Rounds eight float32 numbers to the nearest bfloat16, ties to even, including denormals. NaN becomes
// the quiet NaN of its sign. The results are in the low half of each lane.
inline __m256i nearest_bf16(__m256i bits) {
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(0x7fffffff), bits);
  __m256i quiet = _mm256_or_si256(sign, _mm256_set1_epi32(0x7fc00000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, nan), 16);
}

inline __m256i load_as_f32(const uint8_t* in, Stored type) {
  if (type == Stored::kF32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  return _mm256_castps_si256(_mm256_cvtph_ps(half));
}

// Converts `count` numbers; `in` must have room for eight more.
inline void to_bf16(const uint8_t* in, Stored type, long count, uint16_t* out) {
  int size = type == Stored::kF32 ? 4 : 2;
  for (long i = 0; i < count; i += 8) {
    __m256i eight = nearest_bf16(load_as_f32(in + i * size, type));
    __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(eight),
                                      _mm256_extracti128_si256(eight, 1));
    if (count - i >= 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), narrow);
    } else {
      uint16_t rest[8];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), narrow);
      std::memcpy(out + i, rest, size_t(count - i) * 2);
    }
  }
}

// One thread's work on all matrices.
class FileReader {
  static constexpr long kPiece = 32 * 1024;  // numbers converted to bfloat16 at a time

 public:
  FileReader(const Stretch* stretches, Progress* progress)
      : stretches_(stretches), progress_(progress) {}

  // Does one item. Returns false if all threads should stop.
  bool work(const MatrixInFiles& matrix, long item) {
    if (matrix.format == kPlain) {
      long first = item * matrix.step, last = std::min<long>(first + matrix.step, matrix.rows);
      return read(matrix, first, last, matrix.out + first * matrix.columns);
    }
    long half = matrix.paired ? matrix.rows / 2 : matrix.rows, width = matrix.paired ? 16 : kPanel;
    long panel = item * matrix.step, panels = (half + width - 1) / width;
    long last_panel = std::min<long>(panel + matrix.step, panels);
    long first = panel * width, last = std::min(last_panel * width, half), count = last - first;
    grow(room_, size_t(matrix.step * kPanel * matrix.columns));
    uint8_t* rows = reinterpret_cast<uint8_t*>(room_.data());
    if (!read(matrix, first, last, rows)) return false;
    if (matrix.paired &&
        !read(matrix, half + first, half + last, rows + count * matrix.columns * 2))
      return false;
    Packing op;
    op.w = room_.data();
    op.N = matrix.paired ? 2 * count : count;
    op.K = matrix.columns;
    op.paired = matrix.paired;
    op.format = static_cast<Format>(matrix.format);
    long scale_bytes = op.format == Format::kInt4 ? 2 : 4;
    op.out = matrix.out + panel * panel_bytes_of(op.format, op.K, {});
    uint8_t* scale = matrix.scale ? matrix.scale + panel * kPanel * scale_bytes : nullptr;
    op.scale = reinterpret_cast<float*>(scale);
    op.scale16 = reinterpret_cast<uint16_t*>(scale);
    op.scale_columns = matrix.scale_columns;
    for (long i = 0; i < last_panel - panel; ++i) pack_panel(op, i);
    return true;
  }

 private:
  template <class T>
  static void grow(std::vector<T>& room, size_t size) {
    if (room.size() < size) room.resize(size);
  }

  // Reads rows `first` to `last`: bytes of a plain matrix, else bfloat16.
  bool read(const MatrixInFiles& matrix, long first, long last, uint8_t* out) {
    long begin = 0;  // the first row of the stretch
    for (const Stretch* s = stretches_ + matrix.first_stretch; first < last; ++s) {
      long end = begin + s->rows;
      if (first < end) {
        long rows = std::min(last, end) - first;
        if (!read(matrix, *s, first - begin, rows, out)) return false;
        out += rows * matrix.columns * (matrix.format == kPlain ? 1 : 2);
        first += rows;
      }
      begin = end;
    }
    return true;
  }

  bool read(const MatrixInFiles& matrix, const Stretch& s, long row, long rows, uint8_t* out) {
    Stored type = static_cast<Stored>(s.type);
    bool plain = matrix.format == kPlain, same = plain || type == Stored::kBf16;
    long size = plain ? 1 : type == Stored::kF32 ? 4 : 2, count = rows * matrix.columns;
    int64_t at = s.offset + row * matrix.columns * size;
    if (same) return is_read(s, read_fully(int(s.file), out, size_t(count * size), at));
    grow(wide_, size_t((kPiece + 8) * size));
    for (long i = 0; i < count; i += kPiece) {
      long some = std::min(kPiece, count - i);
      int fault = read_fully(int(s.file), wide_.data(), size_t(some * size), at + i * size);
      if (!is_read(s, fault)) return false;
      to_bf16(wide_.data(), type, some, reinterpret_cast<uint16_t*>(out) + i);
    }
    return true;
  }

  bool is_read(const Stretch& s, int fault) {
    if (!fault) return true;
    int64_t none = -1;
    if (__atomic_compare_exchange_n(&progress_->fault, &none, &s - stretches_, false,
                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      progress_->error = fault < 0 ? 0 : fault;
    return false;
  }

  const Stretch* stretches_;
  Progress* progress_;
  std::vector<uint16_t> room_;
  std::vector<uint8_t> wide_;
};

// Takes items until none are left or one has failed; all threads share `progress`.
inline void read_files(const MatrixInFiles* matrices, long count, const Stretch* stretches,
                       Progress* progress) {
  FileReader reader(stretches, progress);
  long first_item = 0;
  for (const MatrixInFiles* end = matrices + count; matrices < end;) {
    int64_t item = __atomic_fetch_add(&progress->next, 1, __ATOMIC_RELAXED);
    while (matrices < end && item >= matrices->last_item) first_item = (matrices++)->last_item;
    if (matrices == end || __atomic_load_n(&progress->fault, __ATOMIC_RELAXED) >= 0) return;
    if (!reader.work(*matrices, item - first_item)) return;
  }
}

}  // namespace forge

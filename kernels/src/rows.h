// Rows of images, copied from one pitch to another.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectorized.h"

namespace convolution {

// Copy n elements of each row. The last elements of a row are copied twice unless SIZE, the elements
// of one instruction, divides n.
template <int64_t SIZE>
ALWAYS_INLINE void copy_rows_by(
    const float* from, int64_t from_pitch, float* to, int64_t to_pitch, int64_t rows, int64_t n) {
  for (int64_t row = 0; row < rows; ++row, from += from_pitch, to += to_pitch) {
    for (int64_t i = 0; i + SIZE <= n; i += SIZE) std::memcpy(to + i, from + i, SIZE * sizeof *to);
    std::memcpy(to + n - SIZE, from + n - SIZE, SIZE * sizeof *to);
  }
}

ALWAYS_INLINE void copy_rows(
    const float* from, int64_t from_pitch, float* to, int64_t to_pitch, int64_t rows, int64_t n) {
  if (n >= 16) {
    copy_rows_by<16>(from, from_pitch, to, to_pitch, rows, n);
  } else if (n >= 8) {
    copy_rows_by<8>(from, from_pitch, to, to_pitch, rows, n);
  } else if (n >= 4) {
    copy_rows_by<4>(from, from_pitch, to, to_pitch, rows, n);
  } else if (n > 0) {
    copy_rows_by<1>(from, from_pitch, to, to_pitch, rows, n);
  }
}

}  // namespace convolution

// Products with a matrix whose numbers are integers of a few bits, packed into bytes.
//
// W is (rows, columns). The numbers of a row are cut into blocks, and those of a block share a scale
// and a zero point: W = scale (integer - zero point). The product is left W^T, or left W.
//
// Some rows or columns of W at a time become floats, for as many rows of the other factor as
// possible. W is never in memory as floats, and no copy of the integers is made.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace packed {

struct Matrix {
  int64_t rows = 0, columns = 0;
  int64_t block = 0;  // numbers with one scale; the last block of a row is filled up
  int64_t bits = 0;   // of an integer: 2, 4 or 8, from the lowest bits of a byte on
  const uint8_t* integers = nullptr;
  const float* scales = nullptr;
  const uint8_t* zeros = nullptr;  // packed as the integers are, row by row; or nullptr
  const float* float_zeros = nullptr;  // or nullptr; without both, a zero point is 2^(bits - 1)

  int64_t blocks = 0, row_bytes = 0, zero_bytes = 0;  // of a row

  // Set the sizes of a row.
  void measure() {
    blocks = (columns + block - 1) / block;
    row_bytes = blocks * block * bits / 8;
    zero_bytes = (blocks * bits + 7) / 8;
  }
};

constexpr int64_t MIN_BLOCK = 16;

struct Work {
  Matrix matrix;
  bool is_transposed;  // left W^T, to which `bias` is added unless it is nullptr; else left W
  int64_t rows;        // of `left` and of the result
  const float *left, *bias;
  float* result;
  InstructionSet instructions = instruction_set();

  int64_t inner() const { return is_transposed ? matrix.columns : matrix.rows; }
  int64_t outer() const { return is_transposed ? matrix.rows : matrix.columns; }
  int64_t tasks() const;
};

// Compute a part of the result. May throw std::bad_alloc.
void run(const Work& work, int64_t task);

}  // namespace packed

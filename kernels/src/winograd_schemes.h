// The matrices of Winograd's algorithm.
#pragma once

#include <iterator>

namespace winograd {

// The matrices of an axis with so many taps: B^T, G and A^T. The tiles have WINDOWS windows, which
// read ELEMENTS pixels.
template <int TAPS>
struct Scheme;

template <>
struct Scheme<1> {
  static constexpr int ELEMENTS = 1, WINDOWS = 1;
  static constexpr float PIXELS[1][1] = {{1}}, FILTERS[1][1] = {{1}}, SUMS[1][1] = {{1}};
};

// Polynomials are multiplied by their values at 0, 1, -1 and infinity.
template <>
struct Scheme<3> {
  static constexpr int ELEMENTS = 4, WINDOWS = 2;
  static constexpr float PIXELS[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
  static constexpr float FILTERS[4][3] = {{1, 0, 0}, {.5f, .5f, .5f}, {.5f, -.5f, .5f}, {0, 0, 1}};
  static constexpr float SUMS[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
};

// At 0, 3/4, -3/4, 3/2, -3/2 and infinity: rounding errors are half as large as with 0, 1, -1, 2, -2.
template <>
struct Scheme<5> {
  static constexpr int ELEMENTS = 6, WINDOWS = 2;
  static constexpr float PIXELS[6][6] = {
      {81 / 64.f, 0, -45 / 16.f, 0, 1, 0},
      {0, -27 / 16.f, -9 / 4.f, 3 / 4.f, 1, 0},
      {0, 27 / 16.f, -9 / 4.f, -3 / 4.f, 1, 0},
      {0, -27 / 32.f, -9 / 16.f, 3 / 2.f, 1, 0},
      {0, 27 / 32.f, -9 / 16.f, -3 / 2.f, 1, 0},
      {0, 81 / 64.f, 0, -45 / 16.f, 0, 1}};
  static constexpr float FILTERS[6][5] = {
      {64 / 81.f, 0, 0, 0, 0},
      {-128 / 243.f, -32 / 81.f, -8 / 27.f, -2 / 9.f, -1 / 6.f},
      {-128 / 243.f, 32 / 81.f, -8 / 27.f, 2 / 9.f, -1 / 6.f},
      {32 / 243.f, 16 / 81.f, 8 / 27.f, 4 / 9.f, 2 / 3.f},
      {32 / 243.f, -16 / 81.f, 8 / 27.f, -4 / 9.f, 2 / 3.f},
      {0, 0, 0, 0, 1}};
  static constexpr float SUMS[2][6] = {
      {1, 1, 1, 1, 1, 0}, {0, 3 / 4.f, -3 / 4.f, 3 / 2.f, -3 / 2.f, 1}};
};

template <const auto& TABLE>
struct Matrix {
  static constexpr int ROWS = int(std::size(TABLE)), COLUMNS = int(std::size(TABLE[0]));

  static constexpr float at(int row, int column) { return TABLE[row][column]; }
};

template <typename Original>
struct TransposedMatrix {
  static constexpr int ROWS = Original::COLUMNS, COLUMNS = Original::ROWS;

  static constexpr float at(int row, int column) { return Original::at(column, row); }
};

// A matrix that knows the first number of each row that is not 0.
template <typename Numbers>
struct Sparse : Numbers {
  static constexpr int first(int row) {
    int column = 0;
    while (Numbers::at(row, column) == 0) ++column;
    return column;
  }
};

template <typename Scheme>
using OfPixels = Sparse<Matrix<Scheme::PIXELS>>;
template <typename Scheme>
using OfFilters = Sparse<Matrix<Scheme::FILTERS>>;
template <typename Scheme>
using OfSums = Sparse<Matrix<Scheme::SUMS>>;
template <typename Numbers>
using Transposed = Sparse<TransposedMatrix<Numbers>>;

}  // namespace winograd

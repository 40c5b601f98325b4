// Products of matrices that are read and written where they are:
//
//     y[row][column] = alpha sum over steps of a[row][step] b[step][column] + addends[row][column]
//
// with 0 in the place of negative numbers if there is a Relu.
//
// A matrix is a view of an array: it has an offset and a stride for each of its axes, and so needs no
// transposed or sliced copy. Along up to three axes there are many products of matrices.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "bfloat16.h"
#include "buffer.h"
#include "tiles.h"

namespace product {

constexpr size_t BATCH_AXES = 3;
constexpr size_t MAX_ADDENDS = 2;

// The place of the first element of a matrix in an array, and the distances of its elements.
struct View {
  int64_t offset;
  std::array<int64_t, BATCH_AXES> batch;
  int64_t row, column;
};

struct Sizes {
  std::array<int64_t, BATCH_AXES> batch;
  int64_t rows, columns, steps;

  int64_t products() const { return batch[0] * batch[1] * batch[2]; }
};

template <typename T>
struct Matrix {
  T* data = nullptr;
  View view;

  // Return the first element of one of many matrices.
  T* of(const std::array<int64_t, BATCH_AXES>& indices) const {
    T* first = data + view.offset;
    for (size_t i = 0; i < BATCH_AXES; ++i) first += indices[i] * view.batch[i];
    return first;
  }
};

// A tile of sums, whose rows and columns depend on the instruction set.
struct Tile {
  int64_t rows, columns;
};

Tile tile_of(InstructionSet instructions);

// The parts of rows and of columns whose blocks are the tasks of a product. Each part has as many tiles
// as the others, or one more.
struct Parts {
  int64_t rows = 0, columns = 0;
};

// The numbers of the factors: all of their bits; rounded to bfloat16; or the sum of two such numbers, of
// whose four products the three largest count. Sums are floats. The last kind has an error of at most
// 2^-15 of a product: 2^-16 for the fourth product, and 2^-17 for what the sums leave of each factor. An
// infinite factor makes NaN there.
enum class Precision { FLOAT32, BF16, BF16X3 };

struct Work {
  Sizes sizes;
  float alpha;
  Matrix<const float> a, b;
  size_t addends;  // whose columns are adjacent
  std::array<Matrix<const float>, MAX_ADDENDS> addend;
  bool has_relu;
  Matrix<float> y;  // whose columns are adjacent
  InstructionSet instructions = instruction_set();
  Precision precision = Precision::FLOAT32;
  // For precisions with bfloat16; nullptr for the loops of the instruction set.
  const bfloat16::Multiplier* multiplier = bfloat16::multiplier();
  Parts parts{};

  int64_t tasks() const { return sizes.products() * parts.rows * parts.columns; }
  // Whether the steps of each row of a are adjacent. Else they are copied.
  bool reads_rows() const { return a.view.column == 1 && a.view.row > 0; }
};

// Return the parts that the threads of this machine compute fastest. The results do not depend on
// them.
Parts fastest_parts(const Work& work);

// Compute the rows and columns of one task. It may throw std::bad_alloc.
void multiply(const Work& work, int64_t task);

// Return the fastest multiplier of pairs on this processor: of its instructions for pairs, or else a loop of
// the instruction set.
const bfloat16::Multiplier* multiplier_for(InstructionSet instructions);

// Rows of numbers, `pitch` apart: 0 for one row that is read again and again.
template <typename T>
struct Rows {
  T* data;
  int64_t pitch;
};

// A factor b that is copied once, for products with a few rows each. With a multiplier, b and the rows of a
// are rounded to bfloat16.
class Factor {
 public:
  // `b` is (steps, columns). It may throw std::bad_alloc.
  Factor(
      const float* b, int64_t steps, int64_t columns, InstructionSet instructions,
      const bfloat16::Multiplier* multiplier = nullptr);

  int64_t steps() const { return steps_; }
  // Write y = a b + addend. The rows of a have a pitch; the data of the addend may be nullptr. It may throw
  // std::bad_alloc with a multiplier.
  void multiply(Rows<const float> a, Rows<const float> addend, Rows<float> y, int64_t rows) const;

 private:
  int64_t steps_, columns_;
  InstructionSet instructions_;
  const bfloat16::Multiplier* multiplier_;
  Buffer panels_;
};

}  // namespace product

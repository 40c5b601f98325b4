// The innermost loops of products whose factors are rounded to bfloat16, the upper half of a float.
//
// A number of 32 bits holds a pair: two steps that follow each other, the first one in the lower half.
// A pair takes the place of a float in arrays.
//
//     sums[row][column] = sum over pairs of a[row][pair] panel[pair][column]
//
// where the product of two pairs is the sum of two products in float.
#pragma once

#include <cstdint>

namespace bfloat16 {

constexpr int64_t PAIRS = 16;    // to which the pairs of a row and of a panel are filled up with zeros
constexpr int64_t COLUMNS = 32;  // of a panel and of its sums

// The instructions that multiply pairs.
struct Multiplier {
  int64_t rows;  // of a tile of sums, to whole ones of which rows are filled up
  // Add to the sums of a panel, or replace them if the pairs `are_first`. The rows of a are `pitch`
  // apart. Columns of the panel beyond the given number may be left out.
  void (*add)(
      const float* a, int64_t pitch, int64_t rows, const float* panel, int64_t pairs,
      int64_t columns, float* sums, bool are_first);
};

// Return the fastest instructions of this processor for pairs; nullptr if it has none.
const Multiplier* multiplier();

}  // namespace bfloat16

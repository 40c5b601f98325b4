// The gradient of a Gather of rows: each row of dy is added to the row of the table that it was read
// from. With factors, each row is multiplied with one of them first. With the table, the result is the
// updated table, table - gradient.
//
// Each task has a range of rows of the table. The rows of dy that belong to a row of the table are
// added up in their order, before they are subtracted: the number of tasks changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "buffer.h"

namespace gather {

// A task has at least this many elements of the table.
constexpr int64_t ELEMENTS_PER_TASK = 16384;
// Each task reads all indices, so there are not many tasks.
constexpr int64_t MAX_TASKS = 8;

template <typename Index>
struct Gradient {
  int64_t count;          // of indices
  int64_t rows, columns;  // of the table
  const Index* indices;   // from -rows to rows - 1; negative ones count from the end
  const float* dy;        // (count, columns)
  const float* factors;   // (count), or null
  const float* table;     // (rows, columns), or null
  float* result;          // (rows, columns), in other memory than the table

  int64_t tasks() const {
    return std::max<int64_t>(1, std::min({rows * columns / ELEMENTS_PER_TASK, rows, MAX_TASKS}));
  }
};

// Return whether all indices are in their range.
bool are_in_range(const Gradient<int32_t>& work);
bool are_in_range(const Gradient<int64_t>& work);

// Compute the rows of one task. May throw std::bad_alloc.
void differentiate(const Gradient<int32_t>& work, int64_t task);
void differentiate(const Gradient<int64_t>& work, int64_t task);

// The rows of a gradient that are not zeros, without an array for all of them.
class Rows {
 public:
  // `work` needs no result. Rows of dy with the same index are added up in their order. May throw
  // std::bad_alloc.
  template <typename Index>
  explicit Rows(const Gradient<Index>& work);

  // Return the first element of a row; nullptr for zeros.
  const float* operator[](int64_t row) const { return rows_[size_t(row)]; }

 private:
  std::vector<const float*> rows_;
  Buffer sums_;
};

}  // namespace gather

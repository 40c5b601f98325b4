// The sum of each column of a matrix, such as the gradient of a bias.
#pragma once

#include <algorithm>
#include <cstdint>

namespace column_sums {

constexpr int64_t MAX_COLUMNS = 512;  // of a task, whose sums stay in the nearest cache
constexpr int64_t ELEMENTS = 32768;   // of a task: they are worth the start of a thread

struct Work {
  int64_t rows, columns;
  const float* x;
  float* parts;  // (row_parts(), columns): the sums of the rows of each part

  int64_t columns_per_task() const { return std::min(columns, MAX_COLUMNS); }
  int64_t rows_per_task() const { return ELEMENTS / std::max<int64_t>(columns_per_task(), 1); }
  int64_t column_parts() const { return (columns + MAX_COLUMNS - 1) / MAX_COLUMNS; }
  int64_t row_parts() const { return (rows + rows_per_task() - 1) / rows_per_task(); }
  int64_t tasks() const { return row_parts() * column_parts(); }
};

// Add up some rows of some columns.
void add_rows(const Work& work, int64_t task);

// Add up the parts in their order, so that threads do not change the sums.
void add_parts(const Work& work, float* sums);

}  // namespace column_sums

// Operators on rows: their tasks, and sums in lanes, which become vector instructions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectorized.h"

namespace lanes {

constexpr int64_t LANES = 16;

// Call function(i, the lane of i) for i = 0, ..., n - 1.
template <typename Function>
ALWAYS_INLINE void for_each(int64_t n, const Function& function) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    ROLLED for (int64_t lane = 0; lane < LANES; ++lane) function(i + lane, lane);
  }
  INDEPENDENT for (int64_t lane = 0; lane < n - i; ++lane) function(i + lane, lane);
}

// Return the sum of all lanes, and overwrite them.
ALWAYS_INLINE float total(float* sums) {
  for (int64_t half = LANES / 2; half; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

// Add up rows of numbers, `pitch` apart, in their order and in double: the parts that tasks have in sums,
// so that threads do not change these.
ALWAYS_INLINE void add_rows(
    const float* rows, int64_t pitch, int64_t count, int64_t columns, float* sums) {
  for (int64_t first = 0; first < columns; first += LANES) {
    const int64_t n = std::min(LANES, columns - first);
    double total[LANES] = {};
    for (int64_t row = 0; row < count; ++row) {
      const float* numbers = rows + row * pitch + first;
      INDEPENDENT for (int64_t i = 0; i < n; ++i) total[i] += double(numbers[i]);
    }
    INDEPENDENT for (int64_t i = 0; i < n; ++i) sums[first + i] = float(total[i]);
  }
}

// Rows with `columns` elements each. A task has LEAST of them, or as many as are worth a thread's start.
template <int64_t LEAST>
struct Rows {
  int64_t rows, columns;

  int64_t rows_per_task() const {
    constexpr int64_t elements = 8192;
    return std::max(LEAST, elements / std::max<int64_t>(columns, 1));
  }
  int64_t tasks() const { return (rows + rows_per_task() - 1) / rows_per_task(); }
  // The first row of a task, and the one after its last.
  int64_t first(int64_t task) const { return task * rows_per_task(); }
  int64_t end(int64_t task) const { return std::min(first(task + 1), rows); }
};

}  // namespace lanes

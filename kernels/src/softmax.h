// Softmax over the last axis and its gradient: of rows with `columns` elements.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace softmax {

struct Sizes {
  int64_t rows, columns;

  int64_t rows_per_task() const { return lanes::rows_per_task(columns, 1); }
  int64_t tasks() const { return (rows + rows_per_task() - 1) / rows_per_task(); }
};

// y = e^x / sum of e^x. Rows that would be NaN, such as those of -infinity alone, are 0.
struct Masked : Sizes {
  const float* x;
  float* y;
};

// dx = y (dy - sum of dy y)
struct Gradient : Sizes {
  const float *y, *dy;
  float* dx;
  bool is_masked;  // whether y has rows of 0 in the place of rows of NaN
};

// Compute the rows of one task.
void compute(const Masked& work, int64_t task);
void differentiate(const Gradient& work, int64_t task);

}  // namespace softmax

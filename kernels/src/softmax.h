// The gradient of Softmax over the last axis: of rows with `columns` elements.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace softmax {

// dx = y (dy - sum of dy y)
struct Gradient {
  int64_t rows, columns;
  const float *y, *dy;
  float* dx;

  int64_t rows_per_task() const { return lanes::rows_per_task(columns, 1); }
  int64_t tasks() const { return (rows + rows_per_task() - 1) / rows_per_task(); }
};

// Compute the rows of one task.
void differentiate(const Gradient& work, int64_t task);

}  // namespace softmax

// Softmax over the last axis and its gradient: of rows with `columns` elements.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace softmax {

using Sizes = lanes::Rows<1>;

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

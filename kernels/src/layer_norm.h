// LayerNormalization over the last axis and its gradient: of rows with `columns` elements.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace layer_norm {

using Sizes = lanes::Rows<16>;

// y = (x - mean) inverse scale + bias, where inverse = 1 / sqrt(variance + epsilon)
struct Forward : Sizes {
  const float *x, *scale, *bias;  // the bias may be missing
  float epsilon;
  float *y, *mean, *inverse;  // the last two may be missing
};

struct Gradient : Sizes {
  const float *x, *dy, *scale;
  const float *mean, *inverse;  // of each row; inverse is 1 / deviation
  float* dx;
  // The part of each task in dscale, and then its part in dbias: zeros at first. The pointer is null
  // if neither is needed.
  float* parts;
};

// Compute the rows of one task.
void normalize(const Forward& work, int64_t task);
void differentiate(const Gradient& work, int64_t task);

// Add up the parts of all tasks in their order, so that threads do not change the sums.
void add_parts(const Gradient& work, float* dscale, float* dbias);

}  // namespace layer_norm

// BatchNormalization by the statistics of the batch, and its gradient.
//
// A tensor has `images` of `channels` with `pixels` elements each. All sums are over the images and
// pixels of one channel: over lanes of float32 for a while, and then over float64.
#pragma once

#include <algorithm>
#include <cstdint>

namespace batch_norm {

constexpr int64_t ELEMENTS_OF_ROW = 512;  // at least, of neighbouring channels in one task

// The function behind the normalization.
enum Activation : int64_t { NONE, RELU, RELU6 };

struct Work {
  int64_t images, channels, pixels;
  Activation activation;

  int64_t channels_per_task() const {
    const int64_t pixels_or_one = std::max<int64_t>(pixels, 1);
    return std::min(channels, (ELEMENTS_OF_ROW + pixels_or_one - 1) / pixels_or_one);
  }
  int64_t tasks() const {
    return channels ? (channels + channels_per_task() - 1) / channels_per_task() : 0;
  }
};

// y = activation((x - mean) factor + bias)      factor = scale / deviation
struct Forward : Work {
  const float *x, *scale, *bias;
  float epsilon;
  float *y, *mean, *variance, *deviation, *factor;
};

// The gradient of x, and what those of bias and scale are computed from: the sums of dz and of
// dz (x - mean). dz is dy where the activation lets it pass, else 0. That is computed from x again:
// the bits are the same, and the result of the activation need not be read.
struct Gradient : Work {
  const float *x, *dy, *mean, *deviation, *factor;
  const float* bias;  // only with an activation
  float *dx, *sum, *product_sum;
};

// Compute the channels of one task. It may throw std::bad_alloc.
void normalize(const Forward& work, int64_t task);
void differentiate(const Gradient& work, int64_t task);

}  // namespace batch_norm

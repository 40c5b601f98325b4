// Depthwise convolutions of images and their gradients: each filter reads one channel.
//
// The pixels of one channel of some images are copied into a frame: a plane for each remainder of a
// padded coordinate modulo the stride. There, the pixels that a tap reads lie behind each other, for
// any stride, dilation and pad: a convolution is a sum of shifted planes, one for each tap.
#pragma once

#include <cstdint>

#include "axes.h"

namespace depthwise {

constexpr int64_t MAX_TAPS = 49;
constexpr int64_t FRAME_ELEMENTS = 4096;  // of whole images: they stay in the fastest cache
constexpr int64_t CHANNEL_GROUPS = 16;    // at least, if there are as many channels

using convolution::Axes;
using convolution::Axis;

struct Work {
  Axes axes;
  int64_t images, channels;
  const float *x, *w, *bias, *dy;  // those that a direction reads; bias may be missing
  float* result;

  // A task computes some channels of some images, or, of weights, some channels.
  int64_t images_per_task() const;
  int64_t channels_per_task() const;
  int64_t channel_groups() const;
  int64_t image_groups() const;
};

// Compute the result of one task, of `channel_groups() image_groups()`. It may throw std::bad_alloc.
void convolve(const Work& work, int64_t task);             // y of x, w, bias
void convolve_transposed(const Work& work, int64_t task);  // dx of dy, w, bias
// Compute the gradient of some weights, in one task of `channel_groups()`: dw of x, dy.
void differentiate_weights(const Work& work, int64_t task);

}  // namespace depthwise

// The two axes of a convolution of images.
#pragma once

#include <array>
#include <cstdint>

namespace convolution {

// Window o reads pixel `stride o + dilation t - pad` with tap t.
struct Axis {
  int64_t kernel = 1, stride = 1, dilation = 1, pad = 0;  // the pad before the first pixel
  int64_t pixels = 1, windows = 1;
};

using Axes = std::array<Axis, 2>;  // rows and columns

}  // namespace convolution

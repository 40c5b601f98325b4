// The gradient of a MaxPool: each element of dy goes to the first maximum of its window.
//
// The maxima are found again, which takes less time than to read their positions. As in the MaxPool
// of onnxruntime, NaN is no maximum. Where a window has no number above -inf, its first element
// counts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace max_pool {

constexpr size_t AXES = 3;                  // of images; missing ones, in front, have size 1
constexpr size_t ELEMENTS_PER_TASK = 8192;  // about as many, in whole images of one channel

struct Axis {
  int64_t kernel = 1, stride = 1, dilation = 1, pad = 0;  // the pad before the first element
  int64_t size = 1, windows = 1;
};

template <typename T>
struct Work {
  std::array<Axis, AXES> axes;
  size_t images;  // of one channel each
  const T *x, *dy;
  T* dx;

  size_t elements() const;  // of an image
  size_t windows() const;
  size_t images_per_task() const;
  size_t tasks() const { return (images + images_per_task() - 1) / images_per_task(); }
};

// Compute the images of one task.
void run(const Work<float>& work, size_t task);
void run(const Work<double>& work, size_t task);

}  // namespace max_pool

// MaxPoolGradient: dx = gradient(x, dy)
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "max_pool.h"
#include "operator.h"

namespace {

template <typename T>
struct MaxPoolGradient {
  std::array<max_pool::Axis, max_pool::AXES> axes;  // without sizes
  size_t rank = 0;                                  // of an image

  ort::Status* read(const ort::KernelInfo* info) {
    std::vector<int64_t> kernel, strides, dilations, pads;
    RETURN_IF_FAILED(get_integers(info, "kernel_shape", kernel));
    RETURN_IF_FAILED(get_integers(info, "strides", strides));
    RETURN_IF_FAILED(get_integers(info, "dilations", dilations));
    RETURN_IF_FAILED(get_integers(info, "pads", pads));
    rank = kernel.size();
    const auto is_in_range = [this](const std::vector<int64_t>& numbers, int64_t least) {
      return numbers.size() == rank &&
             std::all_of(numbers.begin(), numbers.end(), [least](int64_t n) {
               return n >= least && n <= std::numeric_limits<int32_t>::max();
             });
    };
    if (rank < 1 || rank > max_pool::AXES || !is_in_range(kernel, 1) || !is_in_range(strides, 1) ||
        !is_in_range(dilations, 1) || !is_in_range(pads, 0)) {
      return api->error("The attributes of MaxPoolGradient are out of range.");
    }
    for (size_t i = 0; i < rank; ++i) {
      axes[i + max_pool::AXES - rank] = {kernel[i], strides[i], dilations[i], pads[i], 1, 1};
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor x, dy;
    RETURN_IF_FAILED(get_input(context, 0, x));
    RETURN_IF_FAILED(get_input(context, 1, dy));
    if (x.shape.size() != rank + 2 || dy.shape.size() != rank + 2 || x.shape[0] != dy.shape[0] ||
        x.shape[1] != dy.shape[1]) {
      return api->error("MaxPoolGradient needs x and dy of (images, channels, sizes ...).");
    }
    max_pool::Work<T> work{axes, size_t(x.shape[0] * x.shape[1]), nullptr, nullptr, nullptr};
    for (size_t i = 0; i < rank; ++i) {
      max_pool::Axis& axis = work.axes[i + max_pool::AXES - rank];
      axis.size = x.shape[i + 2];
      axis.windows = dy.shape[i + 2];
    }
    void* dx = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, x.shape, dx));
    work.x = static_cast<const T*>(x.data);
    work.dy = static_cast<const T*>(dy.data);
    work.dx = static_cast<T*>(dx);
    const auto task = [](void* data, size_t index) {
      max_pool::run(*static_cast<const max_pool::Work<T>*>(data), index);
    };
    return run_tasks(context, task, work.tasks(), &work);
  }
};

}  // namespace

// SoftmaxGradient: dx = gradient(y, dy), where y is the result of a Softmax over the last axis
#pragma once

#include "operator.h"
#include "softmax.h"

namespace {

struct SoftmaxGradient {
  ort::Status* read(const ort::KernelInfo* info) {
    size_t inputs = 0;
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_INPUT_COUNT, info, &inputs));
    return inputs == 2 ? nullptr : api->error("SoftmaxGradient has two inputs.");
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor y, dy;
    RETURN_IF_FAILED(get_input(context, 0, y));
    RETURN_IF_FAILED(get_input(context, 1, dy));
    if (y.shape.empty() || dy.shape != y.shape || y.shape.back() < 1) {
      return api->error("SoftmaxGradient needs y and dy of (sizes ..., columns).");
    }
    void* dx = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, y.shape, dx));
    const int64_t columns = y.shape.back();
    softmax::Gradient work{
        int64_t(y.elements()) / columns, columns, static_cast<const float*>(y.data),
        static_cast<const float*>(dy.data), static_cast<float*>(dx)};
    const auto task = [](void* data, size_t index) {
      softmax::differentiate(*static_cast<const softmax::Gradient*>(data), int64_t(index));
    };
    return run_tasks(context, task, size_t(work.tasks()), &work);
  }
};

}  // namespace

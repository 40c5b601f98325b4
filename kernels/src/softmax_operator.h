// MaskedSoftmax:   y = softmax(x) over the last axis, with 0 in the rows that would be NaN
// SoftmaxGradient: dx = gradient(y, dy), where y is the result of a Softmax over the last axis; if
//                  `is_masked`, of a MaskedSoftmax
#pragma once

#include "operator.h"
#include "softmax.h"

namespace {

struct MaskedSoftmax {
  ort::Status* read(const ort::KernelInfo* info) {
    size_t inputs = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    return inputs == 1 ? nullptr : api->error("MaskedSoftmax has one input.");
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor x;
    RETURN_IF_FAILED(get_input(context, 0, x));
    if (x.shape.empty() || x.shape.back() < 1) {
      return api->error("MaskedSoftmax needs x of (sizes ..., columns).");
    }
    void* y = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, x.shape, y));
    const int64_t columns = x.shape.back();
    softmax::Masked work{
        {int64_t(x.elements()) / columns, columns}, static_cast<const float*>(x.data),
        static_cast<float*>(y)};
    const auto task = [](void* data, size_t index) {
      softmax::compute(*static_cast<const softmax::Masked*>(data), int64_t(index));
    };
    return run_tasks(context, task, size_t(work.tasks()), &work);
  }
};

struct SoftmaxGradient {
  int64_t is_masked = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    size_t inputs = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(get_integer(info, "is_masked", is_masked));
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
        {int64_t(y.elements()) / columns, columns}, static_cast<const float*>(y.data),
        static_cast<const float*>(dy.data), static_cast<float*>(dx), is_masked != 0};
    const auto task = [](void* data, size_t index) {
      softmax::differentiate(*static_cast<const softmax::Gradient*>(data), int64_t(index));
    };
    return run_tasks(context, task, size_t(work.tasks()), &work);
  }
};

}  // namespace

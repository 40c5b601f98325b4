// BatchNorm: y, mean, variance, deviation, factor = normalize(x, scale, bias, epsilon)
// BatchNormGradient: dx, sum, product_sum = gradient(x, dy, mean, deviation, factor, bias)
//
// All but x, y and their gradients have one element for each channel, in the shape (1, channels,
// 1, ...), which scale and bias need not have; epsilon is a number. The attribute `activation` says
// what follows; without an activation, BatchNormGradient has no bias.
#pragma once

#include <type_traits>

#include "batch_norm.h"
#include "operator.h"

namespace {

template <typename Work>
struct BatchNorm {
  static constexpr bool is_forward = std::is_same_v<Work, batch_norm::Forward>;
  int64_t activation = 0;
  size_t inputs = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(get_integer(info, "activation", activation));
    const size_t expected = is_forward ? 4 : activation ? 6 : 5;
    if (activation < batch_norm::NONE || activation > batch_norm::RELU6 || inputs != expected) {
      return api->error("The attributes of BatchNorm are out of range.");
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    std::vector<Tensor> tensors(inputs);
    for (size_t i = 0; i < inputs; ++i) RETURN_IF_FAILED(get_input(context, i, tensors[i]));
    const std::vector<int64_t>& shape = tensors[0].shape;
    if (shape.size() < 2 || !tensors[0].elements()) {
      return api->error("BatchNorm needs x of (images, channels, sizes ...).");
    }
    Work work{};
    work.images = shape[0];
    work.channels = shape[1];
    work.pixels = int64_t(tensors[0].elements()) / (shape[0] * shape[1]);
    work.activation = static_cast<batch_norm::Activation>(activation);
    for (size_t i = 1; i < inputs; ++i) {
      const bool fits = is_forward && i == 3    ? tensors[i].elements() == 1
                        : !is_forward && i == 1 ? tensors[i].shape == shape
                                                : tensors[i].elements() == size_t(work.channels);
      if (!fits) return api->error("The inputs of BatchNorm do not fit each other.");
    }
    std::vector<int64_t> of_channels(shape.size(), 1);
    of_channels[1] = work.channels;
    const auto input = [&](size_t i) { return static_cast<const float*>(tensors[i].data); };
    const auto output = [&](size_t i, float*& result) -> ort::Status* {
      void* data = nullptr;
      RETURN_IF_FAILED(get_output(context, i, i ? of_channels : shape, data));
      result = static_cast<float*>(data);
      return nullptr;
    };
    work.x = input(0);
    if constexpr (is_forward) {
      work.scale = input(1);
      work.bias = input(2);
      work.epsilon = *input(3);
      RETURN_IF_FAILED(output(0, work.y));
      RETURN_IF_FAILED(output(1, work.mean));
      RETURN_IF_FAILED(output(2, work.variance));
      RETURN_IF_FAILED(output(3, work.deviation));
      RETURN_IF_FAILED(output(4, work.factor));
    } else {
      work.dy = input(1);
      work.mean = input(2);
      work.deviation = input(3);
      work.factor = input(4);
      work.bias = activation ? input(5) : nullptr;
      RETURN_IF_FAILED(output(0, work.dx));
      RETURN_IF_FAILED(output(1, work.sum));
      RETURN_IF_FAILED(output(2, work.product_sum));
    }
    const char* no_memory = "There is not enough memory for BatchNorm.";
    return run_tasks_that_throw(context, work.tasks(), no_memory, [&work](int64_t task) {
      if constexpr (is_forward) {
        batch_norm::normalize(work, task);
      } else {
        batch_norm::differentiate(work, task);
      }
    });
  }
};

}  // namespace

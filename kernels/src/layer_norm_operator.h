// LayerNorm: y, mean, inverse = normalization(x, scale, bias)
//
// The bias may be missing, and so may mean and inverse.
//
// LayerNormGradient: dx, dscale, dbias = gradient(x, dy, scale, mean, inverse)
//
// x and dy have rows along their last axis. mean and inverse have one element for each row, scale,
// dscale and dbias one for each column. dscale and dbias are missing if neither is needed.
#pragma once

#include <array>

#include "layer_norm.h"
#include "operator.h"

namespace {

struct LayerNorm {
  size_t inputs = 0, outputs = 0;
  float epsilon = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(api->call(ort::GET_OUTPUT_COUNT, info, &outputs));
    RETURN_IF_FAILED(get_float(info, "epsilon", epsilon));
    if (inputs < 2 || inputs > 3 || (outputs != 1 && outputs != 3)) {
      return api->error("LayerNorm has two or three inputs, and one output or three.");
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    std::array<Tensor, 3> tensors;
    for (size_t i = 0; i < inputs; ++i) RETURN_IF_FAILED(get_input(context, i, tensors[i]));
    const auto& [x, scale, bias] = tensors;
    if (x.shape.empty() || x.shape.back() < 1) {
      return api->error("LayerNorm needs x of (sizes ..., columns).");
    }
    layer_norm::Forward work{};
    work.columns = x.shape.back();
    work.rows = int64_t(x.elements()) / work.columns;
    const size_t columns = size_t(work.columns);
    if (scale.elements() != columns || (inputs > 2 && bias.elements() != columns)) {
      return api->error("The inputs of LayerNorm do not fit each other.");
    }
    work.x = static_cast<const float*>(x.data);
    work.scale = static_cast<const float*>(scale.data);
    work.bias = static_cast<const float*>(bias.data);
    work.epsilon = epsilon;
    std::array<void*, 3> results{};
    std::vector<int64_t> shape = x.shape;
    for (size_t i = 0; i < outputs; ++i) {
      RETURN_IF_FAILED(get_output(context, i, shape, results[i]));
      shape.back() = 1;
    }
    work.y = static_cast<float*>(results[0]);
    work.mean = static_cast<float*>(results[1]);
    work.inverse = static_cast<float*>(results[2]);
    const auto task = [](void* data, size_t index) {
      layer_norm::normalize(*static_cast<const layer_norm::Forward*>(data), int64_t(index));
    };
    return run_tasks(context, task, size_t(work.tasks()), &work);
  }
};

struct LayerNormGradient {
  static constexpr size_t inputs = 5;
  size_t outputs = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    size_t count = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &count));
    RETURN_IF_FAILED(api->call(ort::GET_OUTPUT_COUNT, info, &outputs));
    if (count != inputs || (outputs != 1 && outputs != 3)) {
      return api->error("LayerNormGradient has five inputs, and one output or three.");
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    std::array<Tensor, inputs> tensors;
    for (size_t i = 0; i < inputs; ++i) RETURN_IF_FAILED(get_input(context, i, tensors[i]));
    const auto& [x, dy, scale, mean, inverse] = tensors;
    if (x.shape.empty() || x.shape.back() < 1) {
      return api->error("LayerNormGradient needs x of (sizes ..., columns).");
    }
    layer_norm::Gradient work{};
    work.columns = x.shape.back();
    work.rows = int64_t(x.elements()) / work.columns;
    if (dy.shape != x.shape || scale.elements() != size_t(work.columns) ||
        mean.elements() != size_t(work.rows) || inverse.elements() != size_t(work.rows)) {
      return api->error("The inputs of LayerNormGradient do not fit each other.");
    }
    work.x = static_cast<const float*>(x.data);
    work.dy = static_cast<const float*>(dy.data);
    work.scale = static_cast<const float*>(scale.data);
    work.mean = static_cast<const float*>(mean.data);
    work.inverse = static_cast<const float*>(inverse.data);
    std::array<void*, 3> results{};
    for (size_t i = 0; i < outputs; ++i) {
      const std::vector<int64_t> shape = i ? std::vector<int64_t>{work.columns} : x.shape;
      RETURN_IF_FAILED(get_output(context, i, shape, results[i]));
    }
    work.dx = static_cast<float*>(results[0]);
    std::vector<float> parts(outputs > 1 ? size_t(work.tasks() * 2 * work.columns) : 0);
    work.parts = outputs > 1 ? parts.data() : nullptr;
    const auto task = [](void* data, size_t index) {
      layer_norm::differentiate(*static_cast<const layer_norm::Gradient*>(data), int64_t(index));
    };
    RETURN_IF_FAILED(run_tasks(context, task, size_t(work.tasks()), &work));
    if (outputs > 1) {
      layer_norm::add_parts(
          work, static_cast<float*>(results[1]), static_cast<float*>(results[2]));
    }
    return nullptr;
  }
};

}  // namespace

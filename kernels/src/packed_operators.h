// PackedProduct:         y = a W^T + bias
// PackedProductGradient: da = dy W
//
// The inputs are a or dy, the packed integers of W, its scales, zero points if there are any, and a
// bias if there is one.
#pragma once

#include "operator.h"
#include "packed.h"
#include "tiles.h"

namespace {

template <bool IS_TRANSPOSED>
struct PackedProduct {
  packed::Matrix matrix;
  bool has_bias = false;
  size_t inputs = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    if (instruction_set() == InstructionSet::NONE) {
      return api->error("Products with packed integers are not compiled for this processor.");
    }
    int64_t bias = 0;
    RETURN_IF_FAILED(get_integer(info, "N", matrix.rows));
    RETURN_IF_FAILED(get_integer(info, "K", matrix.columns));
    RETURN_IF_FAILED(get_integer(info, "bits", matrix.bits));
    RETURN_IF_FAILED(get_integer(info, "block_size", matrix.block));
    RETURN_IF_FAILED(get_integer(info, "has_bias", bias));
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    has_bias = bias != 0;
    constexpr int64_t most = int64_t(1) << 31;  // so that no product below overflows
    const bool fits = matrix.rows > 0 && matrix.columns > 0 && matrix.rows < most &&
                      matrix.columns < most && matrix.block >= packed::MIN_BLOCK &&
                      matrix.block < most && matrix.block % packed::MIN_BLOCK == 0 &&
                      (matrix.bits == 2 || matrix.bits == 4 || matrix.bits == 8);
    if (!fits || inputs < 3 + size_t(has_bias) || inputs > 4 + size_t(has_bias)) {
      return api->error("The attributes of PackedProduct are out of range.");
    }
    matrix.measure();
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    std::vector<Tensor> tensors(inputs);
    for (size_t i = 0; i < inputs; ++i) RETURN_IF_FAILED(get_input(context, i, tensors[i]));
    packed::Work work{matrix, IS_TRANSPOSED, 0, nullptr, nullptr, nullptr};
    packed::Matrix& w = work.matrix;
    Tensor& left = tensors[0];
    const int64_t blocks = w.rows * w.blocks;
    bool fits = is_of(left, ort::FLOAT) && left.shape.size() > 0 &&
                left.shape.back() == work.inner() &&
                has(tensors[1], ort::UINT8, w.rows * w.row_bytes) &&
                has(tensors[2], ort::FLOAT, blocks);
    if (inputs == 4 + size_t(has_bias)) {
      const Tensor& zeros = tensors[3];
      const bool are_floats = is_of(zeros, ort::FLOAT);
      fits = fits && (are_floats ? has(zeros, ort::FLOAT, blocks)
                                 : has(zeros, ort::UINT8, w.rows * w.zero_bytes));
      if (are_floats) w.float_zeros = static_cast<const float*>(zeros.data);
      else w.zeros = static_cast<const uint8_t*>(zeros.data);
    }
    if (has_bias) {
      fits = fits && has(tensors.back(), ort::FLOAT, work.outer());
      work.bias = static_cast<const float*>(tensors.back().data);
    }
    if (!fits) return api->error("The inputs of PackedProduct do not fit its attributes.");
    work.left = static_cast<const float*>(left.data);
    w.integers = static_cast<const uint8_t*>(tensors[1].data);
    w.scales = static_cast<const float*>(tensors[2].data);
    work.rows = int64_t(left.elements()) / work.inner();
    left.shape.back() = work.outer();
    void* result = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, left.shape, result));
    work.result = static_cast<float*>(result);
    return run_tasks_that_throw(
        context, work.tasks(), "PackedProduct has no memory for its sums.",
        [&](int64_t task) { packed::run(work, task); });
  }

  static bool is_of(const Tensor& tensor, ort::ElementType type) { return tensor.type == type; }

  static bool has(const Tensor& tensor, ort::ElementType type, int64_t elements) {
    return is_of(tensor, type) && int64_t(tensor.elements()) == elements;
  }
};

}  // namespace

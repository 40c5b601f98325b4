// LowRankGradient: da, db = gradient(x, dy, a, b), the gradients of the factors of scale x a' b
//
// x is (sizes ..., columns of a), dy is (sizes ..., columns of b), a and da are (rank, columns), b
// and db, too.
#pragma once

#include <array>
#include <cstring>

#include "buffer.h"
#include "low_rank.h"
#include "operator.h"

namespace {

struct LowRankGradient {
  float scale = 1.0f;

  ort::Status* read(const ort::KernelInfo* info) {
    if (instruction_set() == InstructionSet::NONE) {
      return api->error("LowRankGradient is not compiled for this processor.");
    }
    size_t inputs = 0, outputs = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(api->call(ort::GET_OUTPUT_COUNT, info, &outputs));
    if (inputs != 4 || outputs != 2) {
      return api->error("LowRankGradient has four inputs and two outputs.");
    }
    return get_float(info, "scale", scale);
  }

  ort::Status* compute(ort::KernelContext* context) const {
    std::array<Tensor, 4> tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      RETURN_IF_FAILED(get_input(context, i, tensors[i]));
    }
    if (!fits(tensors)) return api->error("The inputs of LowRankGradient do not fit each other.");
    low_rank::Gradient work{};
    work.rank = tensors[2].shape[0];
    work.scale = scale;
    std::array<Buffer, 2> matrices;
    std::array<float*, 2> results;
    for (size_t i = 0; i < 2; ++i) {
      const Tensor &rows = tensors[i], &matrix = tensors[i + 2];
      const int64_t columns = rows.shape.back();
      work.rows = int64_t(rows.elements()) / columns;
      matrices[i] = Buffer(work.padded_rank() * columns);
      float* padded = matrices[i].data();
      std::memcpy(padded, matrix.data, matrix.elements() * sizeof(float));
      std::fill(padded + matrix.elements(), padded + work.padded_rank() * columns, 0.0f);
      work.factors[i] = {static_cast<const float*>(rows.data), columns, padded};
      void* result = nullptr;
      RETURN_IF_FAILED(get_output(context, i, matrix.shape, result));
      results[i] = static_cast<float*>(result);
    }
    const Buffer parts(work.tasks() * work.part());
    work.parts = parts.data();
    const auto task = [](void* data, size_t index) {
      low_rank::differentiate(*static_cast<const low_rank::Gradient*>(data), int64_t(index));
    };
    RETURN_IF_FAILED(run_tasks(context, task, size_t(work.tasks()), &work));
    low_rank::add_parts(work, results[0], results[1]);
    return nullptr;
  }

  static bool fits(const std::array<Tensor, 4>& tensors) {
    const auto& [x, dy, a, b] = tensors;
    if (x.shape.empty() || dy.shape.empty() || a.shape.size() != 2 || b.shape.size() != 2) {
      return false;
    }
    const bool have_same_rows = std::equal(
        x.shape.begin(), x.shape.end() - 1, dy.shape.begin(), dy.shape.end() - 1);
    const auto are_whole = [](int64_t n) { return n > 0 && n % low_rank::COLUMNS == 0; };
    return have_same_rows && a.shape[0] == b.shape[0] && a.shape[0] > 0 &&
           a.shape[0] <= low_rank::MAX_RANK && x.shape.back() == a.shape[1] &&
           dy.shape.back() == b.shape[1] && are_whole(a.shape[1]) && are_whole(b.shape[1]);
  }
};

}  // namespace

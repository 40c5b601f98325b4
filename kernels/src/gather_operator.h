// GatherGradient(indices, dy) is the gradient of the table; GatherGradient(indices, dy, table) is the
// table less its gradient. If `has_factors`, the last input has a factor for each row of dy.
#pragma once

#include "gather.h"
#include "operator.h"

namespace {

struct GatherGradient {
  std::vector<int64_t> shape;  // of the table
  bool has_table = false, has_factors = false;

  ort::Status* read(const ort::KernelInfo* info) {
    RETURN_IF_FAILED(get_integers(info, "shape", shape));
    size_t inputs = 0;
    int64_t factors = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(get_integer(info, "has_factors", factors));
    has_factors = factors != 0;
    const size_t least = has_factors ? 3 : 2;
    has_table = inputs > least;
    const bool is_shape = !shape.empty() && *std::min_element(shape.begin(), shape.end()) >= 0;
    if (!is_shape || inputs < least || inputs > least + 1) {
      return api->error("GatherGradient needs the attribute shape, and the inputs indices and dy; a table, and factors if has_factors is 1, may follow.");
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor indices, dy, table, factors;
    RETURN_IF_FAILED(get_input(context, 0, indices));
    RETURN_IF_FAILED(get_input(context, 1, dy));
    if (has_table) RETURN_IF_FAILED(get_input(context, 2, table));
    if (has_factors) RETURN_IF_FAILED(get_input(context, has_table ? 3 : 2, factors));
    const int64_t columns =
        std::accumulate(shape.begin() + 1, shape.end(), int64_t(1), std::multiplies<int64_t>());
    if (dy.type != ort::FLOAT || !ends_with_row(dy.shape) ||
        dy.elements() != indices.elements() * size_t(columns)) {
      return api->error("GatherGradient needs float32 rows dy, one for each index.");
    }
    if (has_factors && (factors.type != ort::FLOAT || factors.elements() != indices.elements())) {
      return api->error("GatherGradient needs float32 factors, one for each index.");
    }
    if (has_table && (table.type != ort::FLOAT || table.shape != shape)) {
      return api->error("GatherGradient needs a float32 table of its shape.");
    }
    void* result = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, shape, result));
    const auto run = [&](const auto* numbers) {
      return differentiate(
          context, gather::Gradient<std::decay_t<decltype(*numbers)>>{
                       int64_t(indices.elements()), shape[0], columns, numbers,
                       static_cast<const float*>(dy.data), static_cast<const float*>(factors.data),
                       static_cast<const float*>(table.data), static_cast<float*>(result)});
    };
    switch (indices.type) {
      case ort::INT32: return run(static_cast<const int32_t*>(indices.data));
      case ort::INT64: return run(static_cast<const int64_t*>(indices.data));
      default: return api->error("GatherGradient needs indices of int32 or int64.");
    }
  }

 private:
  // Return whether the last axes of a shape are those of a row of the table.
  bool ends_with_row(const std::vector<int64_t>& whole) const {
    return whole.size() + 1 >= shape.size() &&
           std::equal(shape.begin() + 1, shape.end(), whole.end() - int64_t(shape.size()) + 1);
  }

  template <typename Index>
  ort::Status* differentiate(
      ort::KernelContext* context, const gather::Gradient<Index>& work) const {
    if (!gather::are_in_range(work)) {
      return api->error("GatherGradient got an index that the table does not have.");
    }
    return run_tasks_that_throw(
        context, work.tasks(), "There is not enough memory for the gradient of a Gather.",
        [&](int64_t task) { gather::differentiate(work, task); });
  }
};

}  // namespace

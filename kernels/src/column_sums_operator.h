// ColumnSums: y = the sum of x over all axes but the last
#pragma once

#include "column_sums.h"
#include "operator.h"

namespace {

struct ColumnSums {
  ort::Status* read(const ort::KernelInfo* info) {
    size_t inputs = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    return inputs == 1 ? nullptr : api->error("ColumnSums has one input.");
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor x;
    RETURN_IF_FAILED(get_input(context, 0, x));
    if (x.shape.empty() || x.shape.back() < 1) {
      return api->error("ColumnSums needs x of (sizes ..., columns).");
    }
    column_sums::Work work{};
    work.columns = x.shape.back();
    work.rows = int64_t(x.elements()) / work.columns;
    work.x = static_cast<const float*>(x.data);
    void* result = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, {work.columns}, result));
    std::vector<float> parts(size_t(work.row_parts() * work.columns));
    work.parts = parts.data();
    const auto task = [](void* data, size_t index) {
      column_sums::add_rows(*static_cast<const column_sums::Work*>(data), int64_t(index));
    };
    RETURN_IF_FAILED(run_tasks(context, task, size_t(work.tasks()), &work));
    column_sums::add_parts(work, static_cast<float*>(result));
    return nullptr;
  }
};

}  // namespace

// Product: y = alpha a b + addends; if `has_relu`, negative numbers are replaced by 0
//
// The attribute `sizes` has the sizes of three axes of many products, then rows, columns and steps.
// `views` has six numbers for each input (a, b and up to two addends): an offset, the strides of the
// three axes, and those of rows and columns of the matrix. `strides` has those of y, whose shape is
// `shape` and whose columns are adjacent. `precision` is a number of product::Precision; a node without
// it computes in float32.
#pragma once

#include <algorithm>
#include <utility>

#include "operator.h"
#include "product.h"

namespace {

struct Product {
  product::Work work{};
  std::vector<int64_t> shape;
  std::vector<int64_t> least;  // the number of elements that each input has to have

  ort::Status* read(const ort::KernelInfo* info) {
    if (instruction_set() == InstructionSet::NONE) {
      return api->error("Product is not compiled for this processor.");
    }
    size_t inputs = 0, outputs = 0;
    std::vector<int64_t> sizes, views, strides;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(api->call(ort::GET_OUTPUT_COUNT, info, &outputs));
    RETURN_IF_FAILED(get_integers(info, "sizes", sizes));
    RETURN_IF_FAILED(get_integers(info, "views", views));
    RETURN_IF_FAILED(get_integers(info, "strides", strides));
    RETURN_IF_FAILED(get_integers(info, "shape", shape));
    RETURN_IF_FAILED(get_float(info, "alpha", work.alpha));
    int64_t has_relu = 0;
    RETURN_IF_FAILED(get_integer(info, "has_relu", has_relu));
    work.has_relu = has_relu != 0;
    const int64_t precision = integer_or(info, "precision", int64_t(product::Precision::FLOAT32));
    if (precision < 0 || precision > int64_t(product::Precision::BF16X3)) {
      return api->error("Product has no such precision.");
    }
    work.precision = product::Precision(precision);
    const bool have_counts = outputs == 1 && inputs >= 2 && inputs <= 2 + product::MAX_ADDENDS && sizes.size() == 6 &&
                             views.size() == 6 * inputs && strides.size() == 5;
    if (!have_counts || !are_positive(sizes) || !are_positive(shape)) {
      return api->error("The attributes of Product are out of range.");
    }
    work.sizes = {{sizes[0], sizes[1], sizes[2]}, sizes[3], sizes[4], sizes[5]};
    const auto& [batch, rows, columns, steps] = work.sizes;
    const int64_t axes[4][2] = {{rows, steps}, {steps, columns}, {rows, columns}, {rows, columns}};
    work.addends = inputs - 2;
    for (size_t i = 0; i < inputs; ++i) {
      const product::View view = view_of(views.data() + 6 * i);
      const int64_t elements = elements_of(view, batch, axes[i][0], axes[i][1]);
      if (elements < 0 || (i >= 2 && view.column != 1)) {
        return api->error("A view of Product is out of range.");
      }
      least.push_back(elements);
      (i == 0 ? work.a : i == 1 ? work.b : work.addend[i - 2]).view = view;
    }
    strides.insert(strides.begin(), 0);
    work.y.view = view_of(strides.data());
    work.parts = product::fastest_parts(work);
    return covers_result() ? nullptr : api->error("Product does not write each element once.");
  }

  ort::Status* compute(ort::KernelContext* context) const {
    product::Work now = work;
    for (size_t i = 0; i < least.size(); ++i) {
      Tensor tensor;
      RETURN_IF_FAILED(get_input(context, i, tensor));
      if (int64_t(tensor.elements()) < least[i]) {
        return api->error("An input of Product has fewer elements than its view.");
      }
      (i == 0 ? now.a : i == 1 ? now.b : now.addend[i - 2]).data = static_cast<const float*>(tensor.data);
    }
    void* result = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, shape, result));
    now.y.data = static_cast<float*>(result);
    return run_tasks_that_throw(
        context, now.tasks(), "Product has no memory for its panels.",
        [&](int64_t task) { product::multiply(now, task); });
  }

 private:
  static constexpr int64_t MOST = int64_t(1) << 40;  // of sizes and strides, so that nothing overflows

  static bool are_positive(const std::vector<int64_t>& sizes) {
    int64_t elements = 1;
    for (int64_t size : sizes) {
      if (size < 1 || size > MOST / elements) return false;
      elements *= size;
    }
    return true;
  }

  static product::View view_of(const int64_t* n) { return {n[0], {n[1], n[2], n[3]}, n[4], n[5]}; }

  // Return the number of elements up to the last one of a view; -1 if it is out of range.
  static int64_t elements_of(
      const product::View& view, const std::array<int64_t, product::BATCH_AXES>& batch, int64_t rows,
      int64_t columns) {
    int64_t last = view.offset;
    if (last < 0 || last > MOST) return -1;
    const auto add = [&last](int64_t size, int64_t stride) {
      if (stride < 0 || stride > MOST / size) return false;
      last += (size - 1) * stride;
      return last <= MOST;
    };
    for (size_t i = 0; i < batch.size(); ++i) {
      if (!add(batch[i], view.batch[i])) return -1;
    }
    return add(rows, view.row) && add(columns, view.column) ? last + 1 : -1;
  }

  // Return whether the view of y has each element of the result once.
  bool covers_result() const {
    const auto& [batch, rows, columns, steps] = work.sizes;
    const product::View& view = work.y.view;
    if (view.column != 1) return false;
    std::vector<std::pair<int64_t, int64_t>> axes{{view.row, rows}, {view.column, columns}};
    for (size_t i = 0; i < batch.size(); ++i) axes.emplace_back(view.batch[i], batch[i]);
    std::sort(axes.begin(), axes.end());
    int64_t elements = 1;
    for (const auto& [stride, size] : axes) {
      if (size == 1) continue;
      if (stride != elements) return false;
      elements *= size;
    }
    int64_t all = 1;
    for (int64_t size : shape) all *= size;
    return elements == all;
  }
};

}  // namespace

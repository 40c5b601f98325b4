// Elementwise: y[0], ..., y[m-1] = program(x[0], ..., x[n-1])
//
// The first inputs, as many as the attribute `tensors` says, have the shape of the outputs. The last
// of them may consist of several inputs, as many as `pieces` says, which are joined in the order of
// their elements. The next inputs are spread, as the attribute `spread` says: two numbers for each, see
// elementwise.h. The others have one element.
//
// ElementwiseOfRows: the same, where the last of the tensors is the gradient of a Gather of rows. It
// consists of two inputs, as those of GatherGradient: indices, and a row for each of them.
#pragma once

#include <array>
#include <memory>

#include "elementwise.h"
#include "gather.h"
#include "operator.h"

namespace {

template <typename T, bool OF_ROWS = false>
struct Elementwise {
  elementwise::Program program;

  ort::Status* read(const ort::KernelInfo* info) {
    size_t inputs = 0, outputs = 0;
    int64_t temporaries = 0, count = 0, pieces = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(api->call(ort::GET_OUTPUT_COUNT, info, &outputs));
    RETURN_IF_FAILED(get_integer(info, "temporaries", temporaries));
    RETURN_IF_FAILED(get_integer(info, "tensors", count));
    RETURN_IF_FAILED(get_integer(info, "pieces", pieces));
    std::vector<int64_t> numbers, spread;
    RETURN_IF_FAILED(get_integers(info, "program", numbers));
    RETURN_IF_FAILED(get_integers(info, "spread", spread));
    std::vector<elementwise::Instruction> instructions;
    const int64_t most = int64_t(inputs);
    const bool has_tensors = count > 0 && count <= most && pieces > 0 && pieces - 1 <= most - count;
    const bool has_whole = pieces == 1 || count > 1;  // whose shape is that of the outputs
    const bool has_spread = spread.size() % 2 == 0 && has_tensors &&
                            int64_t(spread.size() / 2) <= most - count - (pieces - 1);
    const bool has_rows = !OF_ROWS || pieces == 2;
    if (!has_spread || !has_whole || !has_rows || temporaries < 0 || !elementwise::read(numbers, instructions)) {
      return api->error("The attributes of Elementwise are out of range.");
    }
    inputs -= size_t(pieces) - 1;
    program = {size_t(count), inputs, outputs, size_t(temporaries), instructions, size_t(pieces)};
    for (size_t i = 0; i < spread.size(); i += 2) program.spread.push_back({spread[i], spread[i + 1]});
    const char* problem = program.problem();
    return problem ? api->error(problem) : nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    elementwise::Work<T> work{&program, 0, {}, {}};
    std::vector<int64_t> shape;
    const size_t more = program.pieces - 1, in_pieces = more ? program.tensors - 1 : program.inputs;
    std::unique_ptr<gather::Rows> rows;
    for (size_t i = 0; i < program.inputs; ++i) {
      if (i == in_pieces) {
        if constexpr (OF_ROWS) RETURN_IF_FAILED(read_rows(context, shape, work, rows));
        else RETURN_IF_FAILED(read_pieces(context, work));
        continue;
      }
      Tensor tensor;
      RETURN_IF_FAILED(get_input(context, i < in_pieces ? i : i + more, tensor));
      const size_t elements = tensor.elements();
      if (i == 0) {
        shape = tensor.shape;
        work.elements = elements;
      }
      if (program.is_spread(i)) {
        if (elements == 0 && work.elements > 0) return api->error("A spread input is empty.");
        work.sizes.push_back(elements);
      } else if (i < program.tensors ? tensor.shape != shape : elements != 1) {
        return api->error("Elementwise has an input of another shape than the first.");
      }
      work.inputs.push_back(static_cast<const T*>(tensor.data));
    }
    for (size_t i = 0; i < program.outputs; ++i) {
      void* data = nullptr;
      RETURN_IF_FAILED(get_output(context, i, shape, data));
      work.outputs.push_back(static_cast<T*>(data));
    }
    return run_tasks_that_throw(
        context, int64_t(work.tasks()), "Elementwise has no memory for its operands.",
        [&](int64_t task) { elementwise::run(work, size_t(task)); });
  }

 private:
  ort::Status* read_pieces(ort::KernelContext* context, elementwise::Work<T>& work) const {
    size_t elements = 0;
    for (size_t i = 0; i < program.pieces; ++i) {
      Tensor tensor;
      RETURN_IF_FAILED(get_input(context, program.tensors - 1 + i, tensor));
      elements += tensor.elements();
      work.pieces.push_back({static_cast<const T*>(tensor.data), elements});
    }
    work.inputs.push_back(nullptr);
    if (elements == work.elements) return nullptr;
    return api->error("Elementwise has pieces of another size than the first input.");
  }

  // Make pieces of rows that have a gradient, and of zeros between them.
  ort::Status* read_rows(
      ort::KernelContext* context, const std::vector<int64_t>& shape, elementwise::Work<T>& work,
      std::unique_ptr<gather::Rows>& rows) const {
    static const std::array<T, elementwise::BLOCK> zeros{};
    Tensor indices, dy;
    RETURN_IF_FAILED(get_input(context, program.tensors - 1, indices));
    RETURN_IF_FAILED(get_input(context, program.tensors, dy));
    const size_t count = shape.empty() || !shape[0] ? 0 : size_t(shape[0]), columns = count ? work.elements / count : 0;
    if (!columns || dy.type != ort::FLOAT || dy.elements() != indices.elements() * columns) {
      return api->error("ElementwiseOfRows needs float32 rows, one for each index.");
    }
    const auto read = [&](const auto* numbers) -> ort::Status* {
      const gather::Gradient<std::decay_t<decltype(*numbers)>> gradient{
          int64_t(indices.elements()), shape[0], int64_t(columns), numbers,
          static_cast<const float*>(dy.data), nullptr, nullptr, nullptr};
      if (!gather::are_in_range(gradient)) {
        return api->error("ElementwiseOfRows got an index that the table does not have.");
      }
      rows = std::make_unique<gather::Rows>(gradient);
      return nullptr;
    };
    switch (indices.type) {
      case ort::INT32: RETURN_IF_FAILED(read(static_cast<const int32_t*>(indices.data))); break;
      case ort::INT64: RETURN_IF_FAILED(read(static_cast<const int64_t*>(indices.data))); break;
      default: return api->error("ElementwiseOfRows needs indices of int32 or int64.");
    }
    work.pieces.reserve(work.elements / elementwise::BLOCK + 2 * indices.elements() + 1);
    size_t end = 0;  // of the pieces so far
    const auto add_zeros_up_to = [&](size_t next) {
      while (end < next) {
        end = std::min(end + elementwise::BLOCK, next);
        work.pieces.push_back({zeros.data(), end});
      }
    };
    for (size_t row = 0; row < count; ++row) {
      const float* data = (*rows)[int64_t(row)];
      if (!data) continue;
      add_zeros_up_to(row * columns);
      end += columns;
      work.pieces.push_back({data, end});
    }
    add_zeros_up_to(work.elements);
    work.inputs.push_back(nullptr);
    return nullptr;
  }
};

}  // namespace

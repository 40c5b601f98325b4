// Scan: last states ..., outputs ... = program(states ..., slices ..., matrices ..., vectors ..., scalars ...)
//
// States are (rows, columns); slices and outputs are (times, rows, columns). A matrix is a factor on the
// right, a vector one row for all rows. The attribute `precision` may be 1: the factors of products are
// rounded to bfloat16.
#pragma once

#include "operator.h"
#include "scan.h"

namespace {

struct Scan {
  scan::Program program;
  bool is_rounded = false;

  ort::Status* read(const ort::KernelInfo* info) {
    if (instruction_set() == InstructionSet::NONE) {
      return api->error("Scan is not compiled for this processor.");
    }
    size_t inputs = 0, outputs = 0;
    int64_t is_reverse = 0;
    std::vector<int64_t> counts, numbers, next;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(api->call(ort::GET_OUTPUT_COUNT, info, &outputs));
    RETURN_IF_FAILED(get_integer(info, "reverse", is_reverse));
    RETURN_IF_FAILED(get_integers(info, "counts", counts));
    RETURN_IF_FAILED(get_integers(info, "columns", program.columns));
    RETURN_IF_FAILED(get_integers(info, "program", numbers));
    RETURN_IF_FAILED(get_integers(info, "next", next));
    if (counts.size() != 4 || counts[0] < 0 || size_t(counts[0]) > outputs || next.size() % 2 ||
        !scan::read(numbers, program.instructions)) {
      return api->error("The attributes of Scan are out of range.");
    }
    program.states = counts[0];
    program.slices = counts[1];
    program.matrices = counts[2];
    program.vectors = counts[3];
    program.inputs = int64_t(inputs);
    program.outputs = int64_t(outputs) - program.states;
    program.is_reverse = is_reverse != 0;
    const int64_t precision = integer_or(info, "precision", 0);
    if (precision < 0 || precision > 1) return api->error("Scan has no such precision.");
    is_rounded = precision == 1;
    for (size_t i = 0; i < next.size(); i += 2) program.next.push_back({next[i], next[i + 1]});
    const char* problem = program.problem();
    return problem ? api->error(problem) : nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    using Kind = scan::Program::Kind;
    std::vector<Tensor> tensors(size_t(program.inputs));
    for (size_t i = 0; i < tensors.size(); ++i) RETURN_IF_FAILED(get_input(context, i, tensors[i]));
    const Tensor& slices = tensors[size_t(program.states)];
    if (slices.shape.size() != 3) return api->error("The slices of Scan have no three axes.");
    scan::Work work{program, slices.shape[0], slices.shape[1], {}, {}, {}, {}};
    const bfloat16::Multiplier* const multiplier = is_rounded ? product::multiplier_for(work.instructions) : nullptr;
    if (multiplier) work.rows_of_tile = multiplier->rows;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& tensor = tensors[i];
      const float* data = static_cast<const float*>(tensor.data);
      const int64_t columns = program.columns[i];
      bool fits = false;
      switch (program.kind(int64_t(i))) {
        case Kind::STATE: fits = tensor.shape == shape_of(work, columns, false); break;
        case Kind::SLICE: fits = tensor.shape == shape_of(work, columns, true); break;
        case Kind::MATRIX: fits = tensor.shape.size() == 2 && tensor.shape[1] == columns; break;
        default: fits = tensor.elements() == size_t(columns);
      }
      if (!fits) return api->error("The inputs of Scan do not fit each other.");
      work.inputs.push_back(data);
      if (program.kind(int64_t(i)) == Kind::MATRIX) {
        work.factors.emplace_back(data, tensor.shape[0], columns, work.instructions, multiplier);
      }
    }
    if (const char* problem = work.problem()) return api->error(problem);
    for (int64_t i = 0; i < program.states + program.outputs; ++i) {
      const bool is_output = i >= program.states;
      const int64_t buffer = is_output ? program.inputs + i - program.states : i;
      void* data = nullptr;
      RETURN_IF_FAILED(get_output(
          context, size_t(i), shape_of(work, program.columns[size_t(buffer)], is_output), data));
      (is_output ? work.outputs : work.last).push_back(static_cast<float*>(data));
    }
    return run_tasks_that_throw(
        context, work.tasks(), "Scan has no memory for its steps.",
        [&](int64_t task) { scan::run(work, task); });
  }

  static std::vector<int64_t> shape_of(const scan::Work& work, int64_t columns, bool in_time) {
    if (in_time) return {work.times, work.rows, columns};
    return {work.rows, columns};
  }
};

}  // namespace

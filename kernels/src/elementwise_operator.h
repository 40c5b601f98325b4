// Elementwise: y[0], ..., y[m-1] = program(x[0], ..., x[n-1])
//
// The first inputs, as many as the attribute `tensors` says, have the shape of the outputs; the
// others have one element.
#pragma once

#include "elementwise.h"
#include "operator.h"

namespace {

template <typename T>
struct Elementwise {
  elementwise::Program program;

  ort::Status* read(const ort::KernelInfo* info) {
    size_t inputs = 0, outputs = 0;
    int64_t temporaries = 0, count = 0;
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_OUTPUT_COUNT, info, &outputs));
    RETURN_IF_FAILED(get_integer(info, "temporaries", temporaries));
    RETURN_IF_FAILED(get_integer(info, "tensors", count));
    std::vector<int64_t> numbers;
    RETURN_IF_FAILED(get_integers(info, "program", numbers));
    std::vector<elementwise::Instruction> instructions;
    const bool has_tensors = count > 0 && static_cast<uint64_t>(count) <= inputs;
    if (!has_tensors || temporaries < 0 || !elementwise::read(numbers, instructions)) {
      return api->error("The attributes of Elementwise are out of range.");
    }
    program = {size_t(count), inputs, outputs, size_t(temporaries), instructions};
    const char* problem = program.problem();
    return problem ? api->error(problem) : nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    elementwise::Work<T> work{&program, 0, {}, {}};
    std::vector<int64_t> shape;
    for (size_t i = 0; i < program.inputs; ++i) {
      Tensor tensor;
      RETURN_IF_FAILED(get_input(context, i, tensor));
      const size_t elements = tensor.elements();
      if (i == 0) {
        shape = tensor.shape;
        work.elements = elements;
      }
      if (i < program.tensors ? tensor.shape != shape : elements != 1) {
        return api->error("Elementwise has an input of another shape than the first.");
      }
      work.inputs.push_back(static_cast<const T*>(tensor.data));
    }
    for (size_t i = 0; i < program.outputs; ++i) {
      void* data = nullptr;
      RETURN_IF_FAILED(get_output(context, i, shape, data));
      work.outputs.push_back(static_cast<T*>(data));
    }
    const auto task = [](void* data, size_t index) {
      elementwise::run(*static_cast<const elementwise::Work<T>*>(data), index);
    };
    return run_tasks(context, task, work.tasks(), &work);
  }
};

}  // namespace

// What all operators need: their attributes, inputs and outputs, and the threads of onnxruntime.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <numeric>
#include <vector>

#include "onnxruntime_api.h"

namespace {

const ort::Api* api = nullptr;

// Return the error of the surrounding function if a call to onnxruntime fails.
#define RETURN_IF_FAILED(call) \
  do {                         \
    if (ort::Status* status = (call)) return status; \
  } while (false)

ort::Status* get_integers(
    const ort::KernelInfo* info, const char* name, std::vector<int64_t>& numbers) {
  size_t count = 0;
  RETURN_IF_FAILED(api->call(ort::GET_ATTRIBUTE_ARRAY_INT64, info, name, nullptr, &count));
  numbers.resize(count);
  return api->call(ort::GET_ATTRIBUTE_ARRAY_INT64, info, name, numbers.data(), &count);
}

ort::Status* get_integer(const ort::KernelInfo* info, const char* name, int64_t& number) {
  return api->call(ort::GET_ATTRIBUTE_INT64, info, name, &number);
}

// Return an attribute, or the default if the node does not have it.
int64_t integer_or(const ort::KernelInfo* info, const char* name, int64_t default_) {
  int64_t number = default_;
  if (ort::Status* status = get_integer(info, name, number)) {
    api->call(ort::RELEASE_STATUS, status);
    return default_;
  }
  return number;
}

ort::Status* get_float(const ort::KernelInfo* info, const char* name, float& number) {
  return api->call(ort::GET_ATTRIBUTE_FLOAT, info, name, &number);
}

struct Tensor {
  void* data = nullptr;
  ort::ElementType type = ort::UNDEFINED;
  std::vector<int64_t> shape;

  size_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), size_t(1), std::multiplies<size_t>());
  }
};

ort::Status* get_input(ort::KernelContext* context, size_t index, Tensor& tensor) {
  const ort::Value* value = nullptr;
  RETURN_IF_FAILED(api->call(ort::GET_INPUT, context, index, &value));
  RETURN_IF_FAILED(api->call(
      ort::GET_TENSOR_MUTABLE_DATA, const_cast<ort::Value*>(value), &tensor.data));
  ort::TensorInfo* info = nullptr;
  RETURN_IF_FAILED(api->call(ort::GET_TENSOR_TYPE_AND_SHAPE, value, &info));
  size_t rank = 0;
  ort::Status* status = api->call(ort::GET_TENSOR_ELEMENT_TYPE, info, &tensor.type);
  if (!status) status = api->call(ort::GET_DIMENSIONS_COUNT, info, &rank);
  if (!status) {
    tensor.shape.resize(rank);
    status = api->call(ort::GET_DIMENSIONS, info, tensor.shape.data(), rank);
  }
  api->call(ort::RELEASE_TENSOR_TYPE_AND_SHAPE, info);
  return status;
}

ort::Status* get_output(
    ort::KernelContext* context, size_t index, const std::vector<int64_t>& shape, void*& data) {
  ort::Value* value = nullptr;
  RETURN_IF_FAILED(
      api->call(ort::GET_OUTPUT, context, index, shape.data(), shape.size(), &value));
  return api->call(ort::GET_TENSOR_MUTABLE_DATA, value, &data);
}

// Run tasks 0, 1, ... on the threads of onnxruntime.
ort::Status* run_tasks(ort::KernelContext* context, ort::Task* task, size_t count, void* data) {
  if (count <= 1) {
    if (count == 1) task(data, 0);
    return nullptr;
  }
  return api->call(ort::PARALLEL_FOR, context, task, count, size_t(0), data);
}

// The same for tasks that may throw, which no exception of theirs may leave. `function` has a task's
// number; `problem` is the error if one of them has thrown.
template <typename Function>
ort::Status* run_tasks_that_throw(
    ort::KernelContext* context, int64_t count, const char* problem, const Function& function) {
  struct Tasks {
    const Function& function;
    std::atomic<bool> failed;
  } tasks{function, {false}};
  const auto task = [](void* data, size_t index) {
    Tasks& all = *static_cast<Tasks*>(data);
    try {
      all.function(int64_t(index));
    } catch (const std::exception&) {
      all.failed = true;
    }
  };
  RETURN_IF_FAILED(run_tasks(context, task, size_t(count), &tasks));
  return tasks.failed ? api->error(problem) : nullptr;
}

}  // namespace

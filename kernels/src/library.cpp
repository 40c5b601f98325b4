// The operators, as onnxruntime sees them, in the domain "onnxfit.kernels".
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>

#include "batch_norm.h"
#include "depthwise.h"
#include "elementwise.h"
#include "layer_norm.h"
#include "max_pool.h"
#include "onnxruntime_api.h"
#include "softmax.h"

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
  int64_t* none = nullptr;
  RETURN_IF_FAILED(
      api->call<ort::Status*>(ort::KERNEL_INFO_GET_ATTRIBUTE_ARRAY_INT64, info, name, none, &count));
  numbers.resize(count);
  return api->call<ort::Status*>(
      ort::KERNEL_INFO_GET_ATTRIBUTE_ARRAY_INT64, info, name, numbers.data(), &count);
}

ort::Status* get_integer(const ort::KernelInfo* info, const char* name, int64_t& number) {
  return api->call<ort::Status*>(ort::KERNEL_INFO_GET_ATTRIBUTE_INT64, info, name, &number);
}

struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> shape;

  size_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), size_t(1), std::multiplies<size_t>());
  }
};

ort::Status* get_input(ort::KernelContext* context, size_t index, Tensor& tensor) {
  const ort::Value* value = nullptr;
  RETURN_IF_FAILED(api->call<ort::Status*>(
      ort::KERNEL_CONTEXT_GET_INPUT, static_cast<const ort::KernelContext*>(context), index, &value));
  RETURN_IF_FAILED(api->call<ort::Status*>(
      ort::GET_TENSOR_MUTABLE_DATA, const_cast<ort::Value*>(value), &tensor.data));
  ort::TensorInfo* info = nullptr;
  RETURN_IF_FAILED(api->call<ort::Status*>(ort::GET_TENSOR_TYPE_AND_SHAPE, value, &info));
  size_t rank = 0;
  const ort::TensorInfo* read = info;
  ort::Status* status = api->call<ort::Status*>(ort::GET_DIMENSIONS_COUNT, read, &rank);
  if (!status) {
    tensor.shape.resize(rank);
    status = api->call<ort::Status*>(ort::GET_DIMENSIONS, read, tensor.shape.data(), rank);
  }
  api->call<void>(ort::RELEASE_TENSOR_TYPE_AND_SHAPE_INFO, info);
  return status;
}

ort::Status* get_output(
    ort::KernelContext* context, size_t index, const std::vector<int64_t>& shape, void*& data) {
  ort::Value* value = nullptr;
  RETURN_IF_FAILED(api->call<ort::Status*>(
      ort::KERNEL_CONTEXT_GET_OUTPUT, context, index, shape.data(), shape.size(), &value));
  return api->call<ort::Status*>(ort::GET_TENSOR_MUTABLE_DATA, value, &data);
}

// Run tasks 0, 1, ... on the threads of onnxruntime.
ort::Status* run_tasks(ort::KernelContext* context, ort::Task* task, size_t count, void* data) {
  if (count <= 1) {
    if (count == 1) task(data, 0);
    return nullptr;
  }
  return api->call<ort::Status*>(
      ort::KERNEL_CONTEXT_PARALLEL_FOR, static_cast<const ort::KernelContext*>(context), task,
      count, size_t(0), data);
}

// Elementwise: y[0], ..., y[m-1] = program(x[0], ..., x[n-1])
//
// The first inputs, as many as the attribute `tensors` says, have the shape of the outputs; the
// others have one element.
// -------------------------------------------------------------------------------------------------

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

// MaxPoolGradient: dx = gradient(x, dy)
// -------------------------------------------------------------------------------------------------

template <typename T>
struct MaxPoolGradient {
  std::array<max_pool::Axis, max_pool::AXES> axes;  // without sizes
  size_t rank = 0;                                  // of an image

  ort::Status* read(const ort::KernelInfo* info) {
    std::vector<int64_t> kernel, strides, dilations, pads;
    RETURN_IF_FAILED(get_integers(info, "kernel_shape", kernel));
    RETURN_IF_FAILED(get_integers(info, "strides", strides));
    RETURN_IF_FAILED(get_integers(info, "dilations", dilations));
    RETURN_IF_FAILED(get_integers(info, "pads", pads));
    rank = kernel.size();
    const auto is_in_range = [this](const std::vector<int64_t>& numbers, int64_t least) {
      return numbers.size() == rank &&
             std::all_of(numbers.begin(), numbers.end(), [least](int64_t n) {
               return n >= least && n <= std::numeric_limits<int32_t>::max();
             });
    };
    if (rank < 1 || rank > max_pool::AXES || !is_in_range(kernel, 1) || !is_in_range(strides, 1) ||
        !is_in_range(dilations, 1) || !is_in_range(pads, 0)) {
      return api->error("The attributes of MaxPoolGradient are out of range.");
    }
    for (size_t i = 0; i < rank; ++i) {
      axes[i + max_pool::AXES - rank] = {kernel[i], strides[i], dilations[i], pads[i], 1, 1};
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor x, dy;
    RETURN_IF_FAILED(get_input(context, 0, x));
    RETURN_IF_FAILED(get_input(context, 1, dy));
    if (x.shape.size() != rank + 2 || dy.shape.size() != rank + 2 || x.shape[0] != dy.shape[0] ||
        x.shape[1] != dy.shape[1]) {
      return api->error("MaxPoolGradient needs x and dy of (images, channels, sizes ...).");
    }
    max_pool::Work<T> work{axes, size_t(x.shape[0] * x.shape[1]), nullptr, nullptr, nullptr};
    for (size_t i = 0; i < rank; ++i) {
      max_pool::Axis& axis = work.axes[i + max_pool::AXES - rank];
      axis.size = x.shape[i + 2];
      axis.windows = dy.shape[i + 2];
    }
    void* dx = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, x.shape, dx));
    work.x = static_cast<const T*>(x.data);
    work.dy = static_cast<const T*>(dy.data);
    work.dx = static_cast<T*>(dx);
    const auto task = [](void* data, size_t index) {
      max_pool::run(*static_cast<const max_pool::Work<T>*>(data), index);
    };
    return run_tasks(context, task, work.tasks(), &work);
  }
};

// DepthwiseConv: y = Conv(x, w, b)
// DepthwiseConvTranspose: x = ConvTranspose(y, w, b)
// DepthwiseConvWeights: dw = gradient(x, dy)
//
// The attributes are those of Conv, and `sizes`: the rows and columns of the result.
// -------------------------------------------------------------------------------------------------

enum class Direction { FORWARD, TRANSPOSED, WEIGHTS };

template <Direction DIRECTION>
struct DepthwiseConv {
  depthwise::Axes axes;  // without sizes
  std::vector<int64_t> sizes;
  size_t inputs = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_INPUT_COUNT, info, &inputs));
    std::vector<int64_t> kernel, strides, dilations, pads;
    RETURN_IF_FAILED(get_integers(info, "kernel_shape", kernel));
    RETURN_IF_FAILED(get_integers(info, "strides", strides));
    RETURN_IF_FAILED(get_integers(info, "dilations", dilations));
    RETURN_IF_FAILED(get_integers(info, "pads", pads));
    RETURN_IF_FAILED(get_integers(info, "sizes", sizes));
    const auto is_in_range = [](const std::vector<int64_t>& numbers, int64_t least, int64_t most) {
      return numbers.size() == 2 && std::all_of(numbers.begin(), numbers.end(), [=](int64_t n) {
               return n >= least && n <= most;
             });
    };
    constexpr int64_t most = std::numeric_limits<int16_t>::max();
    if (!is_in_range(kernel, 1, depthwise::MAX_TAPS) || !is_in_range(strides, 1, most) ||
        !is_in_range(dilations, 1, most) || !is_in_range(pads, 0, most) ||
        !is_in_range(sizes, 1, most) || inputs < 2 || inputs > 3 || kernel[0] * kernel[1] > depthwise::MAX_TAPS) {
      return api->error("The attributes of DepthwiseConv are out of range.");
    }
    for (size_t i = 0; i < 2; ++i) axes[i] = {kernel[i], strides[i], dilations[i], pads[i], 1, 1};
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    constexpr bool has_weights = DIRECTION != Direction::WEIGHTS;
    Tensor first, second, bias;
    RETURN_IF_FAILED(get_input(context, 0, first));
    RETURN_IF_FAILED(get_input(context, 1, second));
    if (inputs > 2) RETURN_IF_FAILED(get_input(context, 2, bias));
    if (first.shape.size() != 4 || second.shape.size() != 4 || !first.elements() ||
        !second.elements()) {
      return api->error("DepthwiseConv needs images of (images, channels, rows, columns).");
    }
    const int64_t channels = first.shape[1];
    depthwise::Work work{axes, first.shape[0], channels, nullptr, nullptr, nullptr, nullptr, nullptr};
    std::vector<int64_t> right{channels, 1, axes[0].kernel, axes[1].kernel};
    std::vector<int64_t> shape{first.shape[0], channels, sizes[0], sizes[1]};
    if (has_weights) {
      work.w = static_cast<const float*>(second.data);
      if (inputs > 2) work.bias = static_cast<const float*>(bias.data);
    } else {
      work.dy = static_cast<const float*>(second.data);
      shape = right;
      right = {first.shape[0], channels, second.shape[2], second.shape[3]};
    }
    if (second.shape != right || (inputs > 2 && bias.elements() != size_t(channels))) {
      return api->error("The inputs of DepthwiseConv do not fit each other.");
    }
    for (size_t i = 0; i < 2; ++i) {
      depthwise::Axis& axis = work.axes[i];
      axis.pixels = DIRECTION == Direction::TRANSPOSED ? sizes[i] : first.shape[i + 2];
      axis.windows = DIRECTION == Direction::TRANSPOSED ? first.shape[i + 2]
                     : has_weights                      ? sizes[i]
                                                        : second.shape[i + 2];
    }
    (DIRECTION == Direction::TRANSPOSED ? work.dy : work.x) = static_cast<const float*>(first.data);
    void* result = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, shape, result));
    work.result = static_cast<float*>(result);
    return run_all(context, work);
  }

 private:
  static ort::Status* run_all(ort::KernelContext* context, const depthwise::Work& work) {
    struct Tasks {
      const depthwise::Work& work;
      std::atomic<bool> failed;
    } tasks{work, {false}};
    const auto task = [](void* data, size_t index) {
      Tasks& all = *static_cast<Tasks*>(data);
      try {
        if constexpr (DIRECTION == Direction::FORWARD) {
          depthwise::convolve(all.work, int64_t(index));
        } else if constexpr (DIRECTION == Direction::TRANSPOSED) {
          depthwise::convolve_transposed(all.work, int64_t(index));
        } else {
          depthwise::differentiate_weights(all.work, int64_t(index));
        }
      } catch (const std::exception&) {  // it may not reach onnxruntime's threads
        all.failed = true;
      }
    };
    const int64_t groups = DIRECTION == Direction::WEIGHTS ? 1 : work.image_groups();
    RETURN_IF_FAILED(run_tasks(context, task, size_t(groups * work.channel_groups()), &tasks));
    return tasks.failed ? api->error("There is not enough memory for DepthwiseConv.") : nullptr;
  }
};

// BatchNorm: y, mean, variance, deviation, factor = normalize(x, scale, bias, epsilon)
// BatchNormGradient: dx, sum, product_sum = gradient(x, dy, mean, deviation, factor, bias)
//
// All but x, y and their gradients have one element for each channel, in the shape (1, channels,
// 1, ...), which scale and bias need not have; epsilon is a number. The attribute `activation` says
// what follows; without an activation, BatchNormGradient has no bias.
// -------------------------------------------------------------------------------------------------

template <typename Work>
struct BatchNorm {
  static constexpr bool is_forward = std::is_same_v<Work, batch_norm::Forward>;
  int64_t activation = 0;
  size_t inputs = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_INPUT_COUNT, info, &inputs));
    RETURN_IF_FAILED(get_integer(info, "activation", activation));
    const size_t expected = is_forward ? 4 : activation ? 6 : 5;
    if (activation < batch_norm::NONE || activation > batch_norm::RELU6 || inputs != expected) {
      return api->error("The attributes of BatchNorm are out of range.");
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    std::vector<Tensor> tensors(inputs);
    for (size_t i = 0; i < inputs; ++i) RETURN_IF_FAILED(get_input(context, i, tensors[i]));
    const std::vector<int64_t>& shape = tensors[0].shape;
    if (shape.size() < 2 || !tensors[0].elements()) {
      return api->error("BatchNorm needs x of (images, channels, sizes ...).");
    }
    Work work{};
    work.images = shape[0];
    work.channels = shape[1];
    work.pixels = int64_t(tensors[0].elements()) / (shape[0] * shape[1]);
    work.activation = static_cast<batch_norm::Activation>(activation);
    for (size_t i = 1; i < inputs; ++i) {
      const bool fits = is_forward && i == 3    ? tensors[i].elements() == 1
                        : !is_forward && i == 1 ? tensors[i].shape == shape
                                                : tensors[i].elements() == size_t(work.channels);
      if (!fits) return api->error("The inputs of BatchNorm do not fit each other.");
    }
    std::vector<int64_t> of_channels(shape.size(), 1);
    of_channels[1] = work.channels;
    const auto input = [&](size_t i) { return static_cast<const float*>(tensors[i].data); };
    const auto output = [&](size_t i, float*& result) -> ort::Status* {
      void* data = nullptr;
      RETURN_IF_FAILED(get_output(context, i, i ? of_channels : shape, data));
      result = static_cast<float*>(data);
      return nullptr;
    };
    work.x = input(0);
    if constexpr (is_forward) {
      work.scale = input(1);
      work.bias = input(2);
      work.epsilon = *input(3);
      RETURN_IF_FAILED(output(0, work.y));
      RETURN_IF_FAILED(output(1, work.mean));
      RETURN_IF_FAILED(output(2, work.variance));
      RETURN_IF_FAILED(output(3, work.deviation));
      RETURN_IF_FAILED(output(4, work.factor));
    } else {
      work.dy = input(1);
      work.mean = input(2);
      work.deviation = input(3);
      work.factor = input(4);
      work.bias = activation ? input(5) : nullptr;
      RETURN_IF_FAILED(output(0, work.dx));
      RETURN_IF_FAILED(output(1, work.sum));
      RETURN_IF_FAILED(output(2, work.product_sum));
    }
    return run_all(context, work);
  }

 private:
  static ort::Status* run_all(ort::KernelContext* context, const Work& work) {
    struct Tasks {
      const Work& work;
      std::atomic<bool> failed;
    } tasks{work, {false}};
    const auto task = [](void* data, size_t index) {
      Tasks& all = *static_cast<Tasks*>(data);
      try {
        if constexpr (is_forward) {
          batch_norm::normalize(all.work, int64_t(index));
        } else {
          batch_norm::differentiate(all.work, int64_t(index));
        }
      } catch (const std::exception&) {  // it may not reach onnxruntime's threads
        all.failed = true;
      }
    };
    RETURN_IF_FAILED(run_tasks(context, task, size_t(work.tasks()), &tasks));
    return tasks.failed ? api->error("There is not enough memory for BatchNorm.") : nullptr;
  }
};

// LayerNormGradient: dx, dscale, dbias = gradient(x, dy, scale, mean, inverse)
//
// x and dy have rows along their last axis. mean and inverse have one element for each row, scale,
// dscale and dbias one for each column. dscale and dbias are missing if neither is needed.
// -------------------------------------------------------------------------------------------------

struct LayerNormGradient {
  static constexpr size_t inputs = 5;
  size_t outputs = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    size_t count = 0;
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_INPUT_COUNT, info, &count));
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_OUTPUT_COUNT, info, &outputs));
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

// SoftmaxGradient: dx = gradient(y, dy), where y is the result of a Softmax over the last axis
// -------------------------------------------------------------------------------------------------

struct SoftmaxGradient {
  ort::Status* read(const ort::KernelInfo* info) {
    size_t inputs = 0;
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::KERNEL_INFO_GET_INPUT_COUNT, info, &inputs));
    return inputs == 2 ? nullptr : api->error("SoftmaxGradient has two inputs.");
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor y, dy;
    RETURN_IF_FAILED(get_input(context, 0, y));
    RETURN_IF_FAILED(get_input(context, 1, dy));
    if (y.shape.empty() || dy.shape != y.shape || y.shape.back() < 1) {
      return api->error("SoftmaxGradient needs y and dy of (sizes ..., columns).");
    }
    void* dx = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, y.shape, dx));
    const int64_t columns = y.shape.back();
    softmax::Gradient work{
        int64_t(y.elements()) / columns, columns, static_cast<const float*>(y.data),
        static_cast<const float*>(dy.data), static_cast<float*>(dx)};
    const auto task = [](void* data, size_t index) {
      softmax::differentiate(*static_cast<const softmax::Gradient*>(data), int64_t(index));
    };
    return run_tasks(context, task, size_t(work.tasks()), &work);
  }
};

// Registration
// -------------------------------------------------------------------------------------------------

template <typename T>
constexpr ort::ElementType element_type = ort::FLOAT;
template <>
constexpr ort::ElementType element_type<double> = ort::DOUBLE;

// The table of an operator's functions. No C++ exception may reach onnxruntime.
template <typename Kernel, typename T>
ort::CustomOp describe(const char*(ORT_CALL* get_name)(const ort::CustomOp*)) {
  using ort::CustomOp;
  CustomOp op;
  std::memset(&op, 0, sizeof op);
  op.version = ort::API_VERSION;
  op.get_name = get_name;
  op.get_provider = [](const CustomOp*) -> const char* { return nullptr; };
  op.get_input_type = [](const CustomOp*, size_t) { return element_type<T>; };
  op.get_input_count = [](const CustomOp*) { return size_t(1); };
  op.get_output_type = [](const CustomOp*, size_t) { return element_type<T>; };
  op.get_output_count = [](const CustomOp*) { return size_t(1); };
  op.get_input_characteristic = [](const CustomOp*, size_t) { return ort::VARIADIC; };
  op.get_output_characteristic = [](const CustomOp*, size_t) { return ort::VARIADIC; };
  op.get_input_memory_type = [](const CustomOp*, size_t) { return 0; };
  op.get_least_inputs = [](const CustomOp*) { return 1; };
  op.get_inputs_have_one_type = [](const CustomOp*) { return 1; };
  op.get_least_outputs = [](const CustomOp*) { return 1; };
  op.get_outputs_have_one_type = [](const CustomOp*) { return 1; };
  op.get_first_opset = [](const CustomOp*) { return 1; };
  op.get_last_opset = [](const CustomOp*) { return 1 << 30; };
  op.create_kernel = [](const CustomOp*, const ort::Api*, const ort::KernelInfo* info,
                        void** kernel) -> ort::Status* {
    try {
      auto made = std::make_unique<Kernel>();
      RETURN_IF_FAILED(made->read(info));
      *kernel = made.release();
      return nullptr;
    } catch (const std::exception& error) {
      return api->error(error.what());
    }
  };
  op.compute = [](void* kernel, ort::KernelContext* context) -> ort::Status* {
    try {
      return static_cast<const Kernel*>(kernel)->compute(context);
    } catch (const std::exception& error) {
      return api->error(error.what());
    }
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

ort::Status* make_domain(ort::CustomOpDomain*& domain) {
  using ort::CustomOp;
  static const CustomOp ops[] = {
      describe<Elementwise<float>, float>([](const CustomOp*) { return "Elementwise"; }),
      describe<Elementwise<double>, double>([](const CustomOp*) { return "Elementwise64"; }),
      describe<MaxPoolGradient<float>, float>([](const CustomOp*) { return "MaxPoolGradient"; }),
      describe<MaxPoolGradient<double>, double>([](const CustomOp*) { return "MaxPoolGradient64"; }),
      describe<DepthwiseConv<Direction::FORWARD>, float>(
          [](const CustomOp*) { return "DepthwiseConv"; }),
      describe<DepthwiseConv<Direction::TRANSPOSED>, float>(
          [](const CustomOp*) { return "DepthwiseConvTranspose"; }),
      describe<DepthwiseConv<Direction::WEIGHTS>, float>(
          [](const CustomOp*) { return "DepthwiseConvWeights"; }),
      describe<BatchNorm<batch_norm::Forward>, float>([](const CustomOp*) { return "BatchNorm"; }),
      describe<BatchNorm<batch_norm::Gradient>, float>(
          [](const CustomOp*) { return "BatchNormGradient"; }),
      describe<LayerNormGradient, float>([](const CustomOp*) { return "LayerNormGradient"; }),
      describe<SoftmaxGradient, float>([](const CustomOp*) { return "SoftmaxGradient"; }),
  };
  ort::CustomOpDomain* made = nullptr;
  const char* name = "onnxfit.kernels";
  RETURN_IF_FAILED(api->call<ort::Status*>(ort::CREATE_CUSTOM_OP_DOMAIN, name, &made));
  for (const CustomOp& op : ops) {
    RETURN_IF_FAILED(api->call<ort::Status*>(ort::CUSTOM_OP_DOMAIN_ADD, made, &op));
  }
  domain = made;
  return nullptr;
}

}  // namespace

extern "C" EXPORTED ort::Status* ORT_CALL RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  static ort::CustomOpDomain* domain = nullptr;  // of all sessions
  if (!domain) {
    api = base->get_api(ort::API_VERSION);
    // Without the functions, an error cannot be made either: sessions find no operator.
    if (!api) return nullptr;
    RETURN_IF_FAILED(make_domain(domain));
  }
  return api->call<ort::Status*>(ort::ADD_CUSTOM_OP_DOMAIN, options, domain);
}

// Conv: y = Conv(x, w, b)
// ConvTranspose: x = ConvTranspose(y, w, b)
// ConvWeights: dw = gradient(x, dy)
//
// DepthwiseConv, DepthwiseConvTranspose, DepthwiseConvWeights: the same, where each filter reads one
// channel
//
// The attributes are those of Conv, with the pads before the first pixel, and `sizes`: those of the
// result. Dense convolutions have one axis or two, depthwise ones two. Dense convolutions also have
// `winograd`: 1 if they are computed by fewer products. They may have `precision`: 1 if the factors of
// products are rounded to bfloat16.
#pragma once

#include <algorithm>
#include <limits>

#include "dense.h"
#include "depthwise.h"
#include "operator.h"

namespace {

using dense::Direction;

template <bool IS_DEPTHWISE, Direction DIRECTION>
struct Conv {
  static constexpr bool has_weights = DIRECTION != Direction::WEIGHTS;
  static constexpr bool is_transposed = DIRECTION == Direction::TRANSPOSED;
  static constexpr const char* no_memory = "There is not enough memory for a convolution.";

  convolution::Axes axes;  // without sizes
  std::vector<int64_t> sizes;
  size_t inputs = 0;
  int64_t winograd = 0, precision = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    if (!IS_DEPTHWISE && instruction_set() == InstructionSet::NONE) {
      return api->error("This processor has no kernel for dense convolutions.");
    }
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &inputs));
    std::vector<int64_t> kernel, strides, dilations, pads;
    RETURN_IF_FAILED(get_integers(info, "kernel_shape", kernel));
    RETURN_IF_FAILED(get_integers(info, "strides", strides));
    RETURN_IF_FAILED(get_integers(info, "dilations", dilations));
    RETURN_IF_FAILED(get_integers(info, "pads", pads));
    RETURN_IF_FAILED(get_integers(info, "sizes", sizes));
    const size_t rank = kernel.size();
    const auto is_in_range = [=](const std::vector<int64_t>& numbers, int64_t least, int64_t most) {
      return numbers.size() == rank && std::all_of(numbers.begin(), numbers.end(), [=](int64_t n) {
               return n >= least && n <= most;
             });
    };
    constexpr int64_t most = std::numeric_limits<int16_t>::max();
    constexpr int64_t most_pixels = std::numeric_limits<int32_t>::max();
    const bool has_rank = IS_DEPTHWISE ? rank == 2 : rank == 1 || rank == 2;
    if (!has_rank || !is_in_range(kernel, 1, most) || !is_in_range(strides, 1, most) ||
        !is_in_range(dilations, 1, most) || !is_in_range(pads, 0, most) ||
        !is_in_range(sizes, 1, most_pixels) || inputs < 2 || inputs > (has_weights ? 3 : 2) ||
        (IS_DEPTHWISE && kernel[0] * kernel[1] > depthwise::MAX_TAPS)) {
      return api->error("The attributes of a convolution are out of range.");
    }
    for (size_t i = 0; i < rank; ++i) {
      axes[2 - rank + i] = {kernel[i], strides[i], dilations[i], pads[i], 1, 1};
    }
    if (!IS_DEPTHWISE) {
      RETURN_IF_FAILED(get_integer(info, "winograd", winograd));
      precision = integer_or(info, "precision", 0);
      if (precision < 0 || precision > 1) return api->error("Convolutions have no such precision.");
    }
    if (winograd && !dense::has_winograd(axes)) {
      return api->error(
          "winograd=1 needs a kernel of 3x3, 1x3, 1x5, 3 or 5, strides and dilations of 1, and pads "
          "smaller than the kernel.");
    }
    return nullptr;
  }

  ort::Status* compute(ort::KernelContext* context) const {
    Tensor first, second, bias;
    RETURN_IF_FAILED(get_input(context, 0, first));
    RETURN_IF_FAILED(get_input(context, 1, second));
    if (inputs > 2) RETURN_IF_FAILED(get_input(context, 2, bias));
    const size_t rank = sizes.size() + 2;
    if (first.shape.size() != rank || second.shape.size() != rank || !first.elements() ||
        !second.elements()) {
      return api->error("A convolution needs images of (images, channels, sizes ...).");
    }
    // The images of the result have the second channels; those of x the first.
    const int64_t channels = first.shape[1];
    const int64_t others = IS_DEPTHWISE ? channels : second.shape[has_weights && !is_transposed ? 0 : 1];
    std::vector<int64_t> weights{channels, IS_DEPTHWISE ? 1 : others};
    if (!is_transposed && !IS_DEPTHWISE) std::swap(weights[0], weights[1]);
    for (size_t i = 4 - rank; i < 2; ++i) weights.push_back(axes[i].kernel);
    std::vector<int64_t> images{first.shape[0], others};
    const auto& of_images = has_weights ? sizes : second.shape;
    images.insert(images.end(), of_images.end() - (rank - 2), of_images.end());
    if (second.shape != (has_weights ? weights : images) ||
        (inputs > 2 && bias.elements() != size_t(others))) {
      return api->error("The inputs of a convolution do not fit each other.");
    }
    void* result = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, has_weights ? images : weights, result));

    Work work{};
    work.axes = axes;
    for (size_t i = 4 - rank; i < 2; ++i) {
      const int64_t here = first.shape[i + rank - 2], there = images[i + rank - 2];
      work.axes[i].pixels = is_transposed ? there : here;
      work.axes[i].windows = is_transposed ? here : there;
    }
    work.images = first.shape[0];
    work.channels = is_transposed ? others : channels;
    if constexpr (!IS_DEPTHWISE) {
      work.filters = is_transposed ? channels : others;
      work.has_pairs = precision == 1;
    }
    (is_transposed ? work.dy : work.x) = static_cast<const float*>(first.data);
    (has_weights ? work.w : work.dy) = static_cast<const float*>(second.data);
    if (inputs > 2) work.bias = static_cast<const float*>(bias.data);
    work.result = static_cast<float*>(result);
    return run(context, work);
  }

 private:
  using Work = std::conditional_t<IS_DEPTHWISE, depthwise::Work, dense::Work>;

  template <typename Function>
  static ort::Status* run_all(ort::KernelContext* context, int64_t count, const Function& function) {
    return run_tasks_that_throw(context, count, no_memory, function);
  }

  ort::Status* run(ort::KernelContext* context, const depthwise::Work& work) const {
    const int64_t groups = has_weights ? work.image_groups() : 1;
    return run_all(context, groups * work.channel_groups(), [&work](int64_t task) {
      if constexpr (DIRECTION == Direction::FORWARD) {
        depthwise::convolve(work, task);
      } else if constexpr (is_transposed) {
        depthwise::convolve_transposed(work, task);
      } else {
        depthwise::differentiate_weights(work, task);
      }
    });
  }

  ort::Status* run(ort::KernelContext* context, const dense::Work& work) const {
    const auto algorithm = winograd ? dense::winograd(work, DIRECTION) : direct(work, DIRECTION);
    const std::vector<int64_t> tasks = algorithm->tasks_of_stages();
    for (size_t stage = 0; stage < tasks.size(); ++stage) {
      const auto run_task = [&](int64_t task) { algorithm->run(stage, task); };
      RETURN_IF_FAILED(run_all(context, tasks[stage], run_task));
    }
    return nullptr;
  }
};

}  // namespace

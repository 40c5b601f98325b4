// The operators, as onnxruntime sees them, in the domain "onnxfit.kernels".
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "announce_operator.h"
#include "batch_norm_operators.h"
#include "column_sums_operator.h"
#include "convolution_operators.h"
#include "elementwise_operator.h"
#include "gather_operator.h"
#include "layer_norm_operator.h"
#include "low_rank_operator.h"
#include "max_pool_operator.h"
#include "packed_operators.h"
#include "product_operator.h"
#include "scan_operator.h"
#include "softmax_operator.h"

namespace {

template <typename T>
constexpr ort::ElementType element_type = ort::FLOAT;
template <>
constexpr ort::ElementType element_type<double> = ort::DOUBLE;
template <>
constexpr ort::ElementType element_type<void> = ort::UNDEFINED;

// The table of an operator's functions. No C++ exception may reach onnxruntime. T is the type of the
// outputs, INPUT that of the inputs; void stands for inputs of several types.
template <typename Kernel, typename T, typename INPUT = T>
ort::CustomOp describe(const char*(ORT_CALL* get_name)(const ort::CustomOp*)) {
  using ort::CustomOp;
  CustomOp op;
  std::memset(&op, 0, sizeof op);
  op.version = ort::API_VERSION;
  op.get_name = get_name;
  op.get_provider = [](const CustomOp*) -> const char* { return nullptr; };
  op.get_input_type = [](const CustomOp*, size_t) { return element_type<INPUT>; };
  op.get_input_count = [](const CustomOp*) { return size_t(1); };
  op.get_output_type = [](const CustomOp*, size_t) { return element_type<T>; };
  op.get_output_count = [](const CustomOp*) { return size_t(1); };
  op.get_input_characteristic = [](const CustomOp*, size_t) { return ort::VARIADIC; };
  op.get_output_characteristic = [](const CustomOp*, size_t) { return ort::VARIADIC; };
  op.get_input_memory_type = [](const CustomOp*, size_t) { return 0; };
  op.get_least_inputs = [](const CustomOp*) { return 1; };
  op.get_inputs_have_one_type = [](const CustomOp*) {
    return int(element_type<INPUT> != ort::UNDEFINED);
  };
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
      describe<Elementwise<float, true>, float, void>(
          [](const CustomOp*) { return "ElementwiseOfRows"; }),
      describe<Elementwise<double>, double>([](const CustomOp*) { return "Elementwise64"; }),
      describe<MaxPoolGradient<float>, float>([](const CustomOp*) { return "MaxPoolGradient"; }),
      describe<MaxPoolGradient<double>, double>([](const CustomOp*) { return "MaxPoolGradient64"; }),
      describe<Conv<true, Direction::FORWARD>, float>(
          [](const CustomOp*) { return "DepthwiseConv"; }),
      describe<Conv<true, Direction::TRANSPOSED>, float>(
          [](const CustomOp*) { return "DepthwiseConvTranspose"; }),
      describe<Conv<true, Direction::WEIGHTS>, float>(
          [](const CustomOp*) { return "DepthwiseConvWeights"; }),
      describe<Conv<false, Direction::FORWARD>, float>([](const CustomOp*) { return "Conv"; }),
      describe<Conv<false, Direction::TRANSPOSED>, float>(
          [](const CustomOp*) { return "ConvTranspose"; }),
      describe<Conv<false, Direction::WEIGHTS>, float>(
          [](const CustomOp*) { return "ConvWeights"; }),
      describe<BatchNorm<batch_norm::Forward>, float>([](const CustomOp*) { return "BatchNorm"; }),
      describe<BatchNorm<batch_norm::Gradient>, float>(
          [](const CustomOp*) { return "BatchNormGradient"; }),
      describe<Scan, float>([](const CustomOp*) { return "Scan"; }),
      describe<LayerNorm, float>([](const CustomOp*) { return "LayerNorm"; }),
      describe<LayerNormGradient, float>([](const CustomOp*) { return "LayerNormGradient"; }),
      describe<ColumnSums, float>([](const CustomOp*) { return "ColumnSums"; }),
      describe<MaskedSoftmax, float>([](const CustomOp*) { return "MaskedSoftmax"; }),
      describe<SoftmaxGradient, float>([](const CustomOp*) { return "SoftmaxGradient"; }),
      describe<PackedProduct<true>, float, void>([](const CustomOp*) { return "PackedProduct"; }),
      describe<PackedProduct<false>, float, void>(
          [](const CustomOp*) { return "PackedProductGradient"; }),
      describe<LowRankGradient, float>([](const CustomOp*) { return "LowRankGradient"; }),
      describe<Product, float>([](const CustomOp*) { return "Product"; }),
      describe<GatherGradient, float, void>([](const CustomOp*) { return "GatherGradient"; }),
      describe<Announce<float>, float>([](const CustomOp*) { return "Announce"; }),
      describe<Announce<double>, double>([](const CustomOp*) { return "Announce64"; }),
  };
  ort::CustomOpDomain* made = nullptr;
  const char* name = "onnxfit.kernels";
  RETURN_IF_FAILED(api->call(ort::CREATE_CUSTOM_OP_DOMAIN, name, &made));
  for (const CustomOp& op : ops) {
    RETURN_IF_FAILED(api->call(ort::CUSTOM_OP_DOMAIN_ADD, made, &op));
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
  return api->call(ort::ADD_CUSTOM_OP_DOMAIN, options, domain);
}

// Return the floats of a vector of the instruction set that products of matrices use here: 0 if there are
// none. All operators that multiply matrices need them.
extern "C" EXPORTED int product_lanes() { return tiles::functions_of(instruction_set()).lanes; }

// Return the PairInstructions that products of bfloat16 numbers use here.
extern "C" EXPORTED int pair_instructions_used() {
  return int(bfloat16::multiplier() ? pair_instructions() : PairInstructions::NONE);
}

// The boards of the operator Announce, for Python. `places` has the addresses of the outputs of all
// announcements, and `sizes` their number for each of `count` announcements.
extern "C" EXPORTED int64_t open_board(
    int64_t count, const int64_t* sizes, const void* const* places) {
  std::vector<announcements::Places> expected;
  for (int64_t i = 0; i < count; places += sizes[i++]) expected.emplace_back(places, places + sizes[i]);
  return announcements::open(std::move(expected));
}
extern "C" EXPORTED void close_board(int64_t key) { announcements::close(key); }
extern "C" EXPORTED void clear_board(int64_t key) { announcements::clear(key); }
extern "C" EXPORTED int wait_for_announcement(int64_t key, int64_t number) {
  return announcements::wait(key, number);
}
extern "C" EXPORTED void give_up_board(int64_t key) { announcements::give_up(key); }

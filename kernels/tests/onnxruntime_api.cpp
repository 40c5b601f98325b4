// Compares the positions and signatures of src/onnxruntime_api.h with the header of onnxruntime, where the
// compiler finds it (with the variable CPATH, for instance). The program has nothing to run.
#if __has_include(<onnxruntime_c_api.h>)
#include "onnxruntime_api.h"

#include <onnxruntime_c_api.h>

#include <cstddef>
#include <type_traits>

namespace {

// The type of onnxruntime for one of ours.
template <typename T>
struct Real {
  using type = T;
};
template <typename T>
struct Real<const T> {
  using type = const typename Real<T>::type;
};
template <typename T>
struct Real<T*> {
  using type = typename Real<T>::type*;
};
template <typename Result, typename... Parameters>
struct Real<Result(Parameters...)> {
  using type = typename Real<Result>::type(typename Real<Parameters>::type...);
};
#define IS(name, real)  \
  template <>           \
  struct Real<name> {   \
    using type = real;  \
  }
IS(ort::Status, OrtStatus);
IS(ort::Value, OrtValue);
IS(ort::TensorInfo, OrtTensorTypeAndShapeInfo);
IS(ort::SessionOptions, OrtSessionOptions);
IS(ort::CustomOpDomain, OrtCustomOpDomain);
IS(ort::KernelInfo, OrtKernelInfo);
IS(ort::KernelContext, OrtKernelContext);
IS(ort::CustomOp, OrtCustomOp);
IS(ort::Api, OrtApi);
IS(ort::ElementType, ONNXTensorElementDataType);
IS(ort::ErrorCode, OrtErrorCode);
IS(ort::Characteristic, OrtCustomOpInputOutputCharacteristic);

// The signature behind a pointer to a function.
template <typename Pointer>
struct Signature;
template <typename Result, typename... Parameters>
struct Signature<Result(ORT_API_CALL*)(Parameters...)> {
  using type = Result(Parameters...);
};
template <typename Result, typename... Parameters>
struct Signature<Result(ORT_API_CALL*)(Parameters...) noexcept> {
  using type = Result(Parameters...);
};

template <size_t POSITION, typename Ours, typename Pointer>
constexpr bool is_same(ort::Entry<POSITION, Ours>, Pointer OrtApi::*, size_t offset) {
  return offset == POSITION * sizeof(ort::Function) &&
         std::is_same_v<typename Real<Ours>::type, typename Signature<Pointer>::type>;
}

#define CHECK(entry, name) static_assert(is_same(ort::entry, &OrtApi::name, offsetof(OrtApi, name)))
CHECK(CREATE_STATUS, CreateStatus);
CHECK(CREATE_CUSTOM_OP_DOMAIN, CreateCustomOpDomain);
CHECK(CUSTOM_OP_DOMAIN_ADD, CustomOpDomain_Add);
CHECK(ADD_CUSTOM_OP_DOMAIN, AddCustomOpDomain);
CHECK(GET_TENSOR_MUTABLE_DATA, GetTensorMutableData);
CHECK(GET_TENSOR_ELEMENT_TYPE, GetTensorElementType);
CHECK(GET_DIMENSIONS_COUNT, GetDimensionsCount);
CHECK(GET_DIMENSIONS, GetDimensions);
CHECK(GET_TENSOR_TYPE_AND_SHAPE, GetTensorTypeAndShape);
CHECK(GET_ATTRIBUTE_FLOAT, KernelInfoGetAttribute_float);
CHECK(GET_ATTRIBUTE_INT64, KernelInfoGetAttribute_int64);
CHECK(GET_INPUT, KernelContext_GetInput);
CHECK(GET_OUTPUT, KernelContext_GetOutput);
CHECK(RELEASE_STATUS, ReleaseStatus);
CHECK(RELEASE_TENSOR_TYPE_AND_SHAPE, ReleaseTensorTypeAndShapeInfo);
CHECK(GET_ATTRIBUTE_ARRAY_INT64, KernelInfoGetAttributeArray_int64);
CHECK(GET_INPUT_COUNT, KernelInfo_GetInputCount);
CHECK(GET_OUTPUT_COUNT, KernelInfo_GetOutputCount);
CHECK(PARALLEL_FOR, KernelContext_ParallelFor);

// The functions of an operator.
#define CHECK_MEMBER(ours, name)                                                                \
  static_assert(offsetof(ort::CustomOp, ours) == offsetof(OrtCustomOp, name));                 \
  static_assert(std::is_same_v<Real<Signature<decltype(ort::CustomOp::ours)>::type>::type,     \
                               Signature<decltype(OrtCustomOp::name)>::type>)
static_assert(offsetof(ort::CustomOp, version) == offsetof(OrtCustomOp, version));
CHECK_MEMBER(create_kernel_before_16, CreateKernel);
CHECK_MEMBER(get_name, GetName);
CHECK_MEMBER(get_provider, GetExecutionProviderType);
CHECK_MEMBER(get_input_type, GetInputType);
CHECK_MEMBER(get_input_count, GetInputTypeCount);
CHECK_MEMBER(get_output_type, GetOutputType);
CHECK_MEMBER(get_output_count, GetOutputTypeCount);
CHECK_MEMBER(compute_before_16, KernelCompute);
CHECK_MEMBER(destroy_kernel, KernelDestroy);
CHECK_MEMBER(get_input_characteristic, GetInputCharacteristic);
CHECK_MEMBER(get_output_characteristic, GetOutputCharacteristic);
CHECK_MEMBER(get_least_inputs, GetVariadicInputMinArity);
CHECK_MEMBER(get_inputs_have_one_type, GetVariadicInputHomogeneity);
CHECK_MEMBER(get_least_outputs, GetVariadicOutputMinArity);
CHECK_MEMBER(get_outputs_have_one_type, GetVariadicOutputHomogeneity);
CHECK_MEMBER(create_kernel, CreateKernelV2);
CHECK_MEMBER(compute, KernelComputeV2);
CHECK_MEMBER(get_first_opset, GetStartVersion);
CHECK_MEMBER(get_last_opset, GetEndVersion);
// These two have types that are not declared here: an enumeration, and a context that is never read.
static_assert(offsetof(ort::CustomOp, get_input_memory_type) == offsetof(OrtCustomOp, GetInputMemoryType));
static_assert(OrtMemTypeDefault == 0 && sizeof(OrtMemType) == sizeof(int));
static_assert(offsetof(ort::CustomOp, infer_shapes) == offsetof(OrtCustomOp, InferOutputShapeFn));

static_assert(offsetof(ort::ApiBase, get_api) == offsetof(OrtApiBase, GetApi));
static_assert(ort::API_VERSION <= ORT_API_VERSION);
static_assert(int(ort::UNDEFINED) == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED);
static_assert(int(ort::FLOAT) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
static_assert(int(ort::UINT8) == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);
static_assert(int(ort::INT32) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
static_assert(int(ort::INT64) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
static_assert(int(ort::DOUBLE) == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE);
static_assert(int(ort::INVALID_ARGUMENT) == ORT_INVALID_ARGUMENT);
static_assert(int(ort::REQUIRED) == INPUT_OUTPUT_REQUIRED && int(ort::OPTIONAL_) == INPUT_OUTPUT_OPTIONAL);
static_assert(int(ort::VARIADIC) == INPUT_OUTPUT_VARIADIC);

}  // namespace
#endif

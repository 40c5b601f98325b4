// The part of onnxruntime's C API that the kernels use.
//
// onnxruntime hands its functions over as one table of pointers, in which new versions only append.
// The positions and signatures below are those of version 17 (onnxruntime 1.17 and later), so that
// one library works with every newer onnxruntime, and no header of onnxruntime is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef _WIN32
#define ORT_CALL __stdcall
#define EXPORTED __declspec(dllexport)
#else
#define ORT_CALL
#define EXPORTED __attribute__((visibility("default")))
#endif

namespace ort {

constexpr uint32_t API_VERSION = 17;  // the first with KernelContext_ParallelFor

struct Status;
struct Value;
struct TensorInfo;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct CustomOp;

enum ElementType : int { UNDEFINED = 0, FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7, DOUBLE = 11 };
enum ErrorCode : int { INVALID_ARGUMENT = 2 };
enum Characteristic : int { REQUIRED = 0, OPTIONAL_ = 1, VARIADIC = 2 };

using Task = void(void* data, size_t index);
using Function = void (*)();

// Positions in the table of functions.
enum Position : size_t {
  CREATE_STATUS = 0,
  CREATE_CUSTOM_OP_DOMAIN = 26,
  CUSTOM_OP_DOMAIN_ADD = 27,
  ADD_CUSTOM_OP_DOMAIN = 28,
  GET_TENSOR_MUTABLE_DATA = 51,
  GET_TENSOR_ELEMENT_TYPE = 60,
  GET_DIMENSIONS_COUNT = 61,
  GET_DIMENSIONS = 62,
  GET_TENSOR_TYPE_AND_SHAPE = 65,
  KERNEL_INFO_GET_ATTRIBUTE_FLOAT = 85,
  KERNEL_INFO_GET_ATTRIBUTE_INT64 = 86,
  KERNEL_CONTEXT_GET_INPUT = 90,
  KERNEL_CONTEXT_GET_OUTPUT = 91,
  RELEASE_TENSOR_TYPE_AND_SHAPE_INFO = 99,
  KERNEL_INFO_GET_ATTRIBUTE_ARRAY_INT64 = 163,
  KERNEL_INFO_GET_INPUT_COUNT = 230,
  KERNEL_INFO_GET_OUTPUT_COUNT = 231,
  KERNEL_CONTEXT_PARALLEL_FOR = 274,
};

struct Api {
  Function functions[KERNEL_CONTEXT_PARALLEL_FOR + 1];

  template <typename Result, typename... Arguments>
  Result call(Position position, Arguments... arguments) const {
    return reinterpret_cast<Result(ORT_CALL*)(Arguments...)>(functions[position])(arguments...);
  }

  Status* error(const char* message) const {
    return call<Status*>(CREATE_STATUS, INVALID_ARGUMENT, message);
  }
};

struct ApiBase {
  const Api*(ORT_CALL* get_api)(uint32_t version);
  const char*(ORT_CALL* get_version)();
};

// An operator: onnxruntime calls these functions. The order is onnxruntime's.
struct CustomOp {
  uint32_t version;
  void*(ORT_CALL* create_kernel_before_16)(const CustomOp*, const Api*, const KernelInfo*);
  const char*(ORT_CALL* get_name)(const CustomOp*);
  const char*(ORT_CALL* get_provider)(const CustomOp*);
  ElementType(ORT_CALL* get_input_type)(const CustomOp*, size_t index);
  size_t(ORT_CALL* get_input_count)(const CustomOp*);
  ElementType(ORT_CALL* get_output_type)(const CustomOp*, size_t index);
  size_t(ORT_CALL* get_output_count)(const CustomOp*);
  void(ORT_CALL* compute_before_16)(void* kernel, KernelContext*);
  void(ORT_CALL* destroy_kernel)(void* kernel);
  Characteristic(ORT_CALL* get_input_characteristic)(const CustomOp*, size_t index);
  Characteristic(ORT_CALL* get_output_characteristic)(const CustomOp*, size_t index);
  int(ORT_CALL* get_input_memory_type)(const CustomOp*, size_t index);
  int(ORT_CALL* get_least_inputs)(const CustomOp*);
  int(ORT_CALL* get_inputs_have_one_type)(const CustomOp*);
  int(ORT_CALL* get_least_outputs)(const CustomOp*);
  int(ORT_CALL* get_outputs_have_one_type)(const CustomOp*);
  Status*(ORT_CALL* create_kernel)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status*(ORT_CALL* compute)(void* kernel, KernelContext*);
  Status*(ORT_CALL* infer_shapes)(const CustomOp*, void*);
  int(ORT_CALL* get_first_opset)(const CustomOp*);
  int(ORT_CALL* get_last_opset)(const CustomOp*);
};

}  // namespace ort

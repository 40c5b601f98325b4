// The part of onnxruntime's C API that the kernels use.
//
// onnxruntime hands its functions over as one table of pointers, in which new versions only append.
// The positions and signatures below are those of version 17 (onnxruntime 1.17 and later), so that
// one library works with every newer onnxruntime.
//
// The header of onnxruntime is not used: it has 200 to 400 kB of somebody else's work, of which this is
// what 19 functions need, and no wheel of onnxruntime contains it. tests/onnxruntime_api.cpp compares the
// two wherever a compiler finds onnxruntime_c_api.h.
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

// A function of the table: its position and its signature.
template <size_t POSITION, typename Signature>
struct Entry {};

constexpr Entry<0, Status*(ErrorCode, const char*)> CREATE_STATUS;
constexpr Entry<26, Status*(const char*, CustomOpDomain**)> CREATE_CUSTOM_OP_DOMAIN;
constexpr Entry<27, Status*(CustomOpDomain*, const CustomOp*)> CUSTOM_OP_DOMAIN_ADD;
constexpr Entry<28, Status*(SessionOptions*, CustomOpDomain*)> ADD_CUSTOM_OP_DOMAIN;
constexpr Entry<51, Status*(Value*, void**)> GET_TENSOR_MUTABLE_DATA;
constexpr Entry<60, Status*(const TensorInfo*, ElementType*)> GET_TENSOR_ELEMENT_TYPE;
constexpr Entry<61, Status*(const TensorInfo*, size_t*)> GET_DIMENSIONS_COUNT;
constexpr Entry<62, Status*(const TensorInfo*, int64_t*, size_t)> GET_DIMENSIONS;
constexpr Entry<65, Status*(const Value*, TensorInfo**)> GET_TENSOR_TYPE_AND_SHAPE;
constexpr Entry<85, Status*(const KernelInfo*, const char*, float*)> GET_ATTRIBUTE_FLOAT;
constexpr Entry<86, Status*(const KernelInfo*, const char*, int64_t*)> GET_ATTRIBUTE_INT64;
constexpr Entry<90, Status*(const KernelContext*, size_t, const Value**)> GET_INPUT;
constexpr Entry<91, Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)> GET_OUTPUT;
constexpr Entry<93, void(Status*)> RELEASE_STATUS;
constexpr Entry<99, void(TensorInfo*)> RELEASE_TENSOR_TYPE_AND_SHAPE;
constexpr Entry<163, Status*(const KernelInfo*, const char*, int64_t*, size_t*)> GET_ATTRIBUTE_ARRAY_INT64;
constexpr Entry<230, Status*(const KernelInfo*, size_t*)> GET_INPUT_COUNT;
constexpr Entry<231, Status*(const KernelInfo*, size_t*)> GET_OUTPUT_COUNT;
constexpr Entry<274, Status*(const KernelContext*, Task*, size_t, size_t, void*)> PARALLEL_FOR;

struct Api {
  Function functions[275];

  template <size_t POSITION, typename Result, typename... Parameters, typename... Arguments>
  Result call(Entry<POSITION, Result(Parameters...)>, Arguments... arguments) const {
    return reinterpret_cast<Result(ORT_CALL*)(Parameters...)>(functions[POSITION])(arguments...);
  }

  Status* error(const char* message) const { return call(CREATE_STATUS, INVALID_ARGUMENT, message); }
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

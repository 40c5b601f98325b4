// The part of onnxruntime's C API that train.cpp uses, under the names of the official header.
//
// onnxruntime hands out its functions as one table, to which new versions only append. The gaps
// stand for functions that train.cpp does not call.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef _WIN32
#define ORT_API_CALL __stdcall
#else
#define ORT_API_CALL
#endif
#define ORT_API_VERSION 17

struct OrtEnv;
struct OrtMemoryInfo;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

enum OrtLoggingLevel { ORT_LOGGING_LEVEL_ERROR = 3 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 = 3,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE = 11,
};

struct OrtApi {
  void* gap_0[2];
  const char*(ORT_API_CALL* GetErrorMessage)(const OrtStatus*);  // 2
  OrtStatus*(ORT_API_CALL* CreateEnv)(OrtLoggingLevel, const char* name, OrtEnv**);  // 3
  void* gap_4[3];
  OrtStatus*(ORT_API_CALL* CreateSession)(const OrtEnv*, const char* path, const OrtSessionOptions*,
                                          OrtSession**);  // 7
  void* gap_8[1];
  OrtStatus*(ORT_API_CALL* Run)(OrtSession*, const OrtRunOptions*, const char* const* input_names,
                                const OrtValue* const* inputs, size_t input_count,
                                const char* const* output_names, size_t output_count,
                                OrtValue** outputs);  // 9
  OrtStatus*(ORT_API_CALL* CreateSessionOptions)(OrtSessionOptions**);  // 10
  void* gap_11[38];
  OrtStatus*(ORT_API_CALL* CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void* data,
                                                           size_t bytes, const int64_t* shape,
                                                           size_t rank, ONNXTensorElementDataType,
                                                           OrtValue**);  // 49
  void* gap_50[1];
  OrtStatus*(ORT_API_CALL* GetTensorMutableData)(OrtValue*, void**);  // 51
  void* gap_52[17];
  OrtStatus*(ORT_API_CALL* CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType,
                                                OrtMemoryInfo**);  // 69
  void* gap_70[26];
  void(ORT_API_CALL* ReleaseValue)(OrtValue*);  // 96
};

struct OrtApiBase {
  const OrtApi*(ORT_API_CALL* GetApi)(uint32_t version);
  const char*(ORT_API_CALL* GetVersionString)();
};

extern "C" const OrtApiBase* ORT_API_CALL OrtGetApiBase();

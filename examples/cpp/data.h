// Tensors, .npy files and the order of rows.
#pragma once

#include <algorithm>
#include <cctype>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "onnxruntime_c_api.h"

using Bytes = std::vector<char>;

struct Type {
  ONNXTensorElementDataType element;
  size_t bytes;
  const char* npy;
};
inline const std::map<std::string, Type> TYPES = {
    {"float32", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4, "<f4"}},
    {"float64", {ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8, "<f8"}},
    {"float16", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2, "<f2"}},
    {"int64", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8, "<i8"}},
    {"int32", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4, "<i4"}},
    {"int8", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1, "|i1"}},
    {"uint8", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1, "|u1"}},
    {"bool", {ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1, "|b1"}},
};

struct Tensor {
  const Type* type;
  std::vector<int64_t> shape;
  char* data;  // little endian and in C order, in the memory of somebody else

  size_t bytes() const {
    return std::accumulate(shape.begin(), shape.end(), type->bytes, std::multiplies<size_t>());
  }
  template <typename T>
  T& scalar() const {
    return *reinterpret_cast<T*>(data);
  }
};

inline void require(bool holds, const std::string& message) {
  if (!holds) throw std::runtime_error(message);
}

inline Bytes read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(bool(file), "cannot read " + path);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

// The array in the bytes of an .npy file, which must be of this type.
inline Tensor npy(Bytes& file, const std::string& path, const std::string& type) {
  const bool known = file.size() > 10 && file[1] == 'N' && file[6] == 1;
  require(known, path + " is no .npy file of version 1");
  const size_t begin = 10 + uint8_t(file[8]) + 256 * uint8_t(file[9]);
  require(begin <= file.size(), path + " is cut off");
  const std::string header(file.data() + 10, file.data() + begin);
  Tensor tensor{&TYPES.at(type), {}, file.data() + begin};
  require(header.find(tensor.type->npy) != std::string::npos &&
              header.find("'fortran_order': False") != std::string::npos,
          path + ": expected " + type + " in C order, got " + header);
  for (size_t at = header.find('('); header.at(at) != ')'; ++at)
    if (std::isdigit(header[at]) && !std::isdigit(header[at - 1]))
      tensor.shape.push_back(std::stoll(header.substr(at)));
  const bool whole = !tensor.shape.empty() && begin + tensor.bytes() == file.size();
  require(whole, path + " has another size");
  return tensor;
}

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// The order of rows in an epoch: the function "lowbias32" of a manifest.
inline std::vector<size_t> permutation(int64_t seed, int64_t epoch, size_t rows) {
  uint32_t keys[] = {0, 1};
  for (uint32_t& key : keys)
    for (int64_t number : {seed, epoch, int64_t(0)})
      for (int shift : {0, 32}) key = mix(key + uint32_t(uint64_t(number) >> shift) + 0x9e3779b9);
  std::vector<uint32_t> hashes(rows);
  for (size_t row = 0; row < rows; ++row) hashes[row] = mix(mix(uint32_t(row) + keys[0]) + keys[1]);
  std::vector<size_t> order(rows);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return hashes[a] < hashes[b]; });
  return order;
}

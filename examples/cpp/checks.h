// The numbers that a step can use. docs/training-folder.md describes the labels of a manifest.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "data.h"
#include "json.h"

inline double half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  double size = std::ldexp(bits & 1023, -24);  // of a subnormal number
  if (exponent > 0) size = std::ldexp(1024 + (bits & 1023), exponent - 25);
  if (exponent == 31) size = bits & 1023 ? NAN : INFINITY;
  return bits >> 15 ? -size : size;
}

inline double number(const Tensor& tensor, size_t i) {
  const char* data = tensor.data + i * tensor.type->bytes;
  const auto as = [data](auto value) {  // an .npy file may not be aligned
    std::memcpy(&value, data, sizeof value);
    return value;
  };
  switch (tensor.type->element) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return as(float());
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return as(double());
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return half(as(uint16_t()));
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return double(as(int64_t()));
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return as(int32_t());
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return as(int8_t());
    default: return as(uint8_t());
  }
}

inline std::string shown(double number) {
  std::ostringstream text;
  text << std::setprecision(15) << number;
  return text.str();
}

// Whether a loss can read a label: it is one of "values", or lies from "least" to "greatest".
inline bool allows(const Json& labels, double label) {
  if (!std::isfinite(label)) return false;
  if (!labels["ignored"].null() && label == labels["ignored"].number()) return true;
  if (!labels["values"].null()) {
    const auto& values = labels["values"].items;
    return std::any_of(values.begin(), values.end(), [=](auto& v) { return v.number() == label; });
  }
  return (labels["least"].null() || label >= labels["least"].number()) &&
         (labels["greatest"].null() || label <= labels["greatest"].number());
}

// The labels that a loss can read, as a message names them.
inline std::string described(const Json& labels, bool classes) {
  std::string text;
  for (const Json& value : labels["values"].items)
    text += (text.empty() ? "labels " : " and ") + shown(value.number());
  if (!text.empty()) return text;
  const Json &least = labels["least"], &greatest = labels["greatest"];
  const std::string kind = classes ? "class indices" : "numbers";
  if (least.null()) return "finite " + kind;
  if (greatest.null()) return "finite " + kind + " >= " + shown(least.number());
  return kind + " from " + shown(least.number()) + " to " + shown(greatest.number());
}

// The array in the bytes of an .npy file, whose numbers must be those that Python accepts: labels
// that the loss can read, finite sample weights, and inputs without NaN.
inline Tensor checked_array(Bytes& file, const std::string& path, const Json& input,
                            const Json& manifest) {
  const Tensor tensor = npy(file, path, input["type"].text);
  const std::string& role = input["role"].text;
  const size_t count = tensor.bytes() / tensor.type->bytes, rows = tensor.shape[0];
  for (size_t i = 0; i < count; ++i) {
    const double value = number(tensor, i);
    const std::string got = "got " + shown(value) + " at row " + std::to_string(i * rows / count);
    if (role == "x") {
      require(!std::isnan(value), input["name"].text + " expects numbers, " + got);
    } else if (role == "sample_weight") {
      require(std::isfinite(value), "sample_weight expects finite numbers, " + got);
    } else if (!allows(input["labels"], value)) {
      std::string loss = "the loss";
      for (const Json& entry : manifest["losses"].items)
        if (entry["output"].text == input["of"].text) loss = entry["name"].text;
      const bool classes = input["type"].text.find("int") == 0;
      throw std::runtime_error(loss + " expects " + described(input["labels"], classes) +
                               " for output " + input["of"].text + ", " + got);
    }
  }
  return tensor;
}

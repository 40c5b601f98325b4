// Functions of one number that compilers make vector instructions of.
//
// In float, each is a polynomial on a short interval, fitted for the smallest largest error, with
// a relative error of at most 2.5e-7. In double, it is the function of the standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectorized.h"

namespace functions {

ALWAYS_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

ALWAYS_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// 2^n e^r, where x = n log 2 + r. NaN stays NaN: it is greater and smaller than nothing.
ALWAYS_INLINE float exponential(float x) {
  constexpr float log2_e = 1.44269504f, log_2_high = 0.693145752f, log_2_low = 1.42860677e-6f;
  constexpr float rounder = 12582912.0f;  // 1.5 2^23: its last bit is that of 1
  x = x < -104.0f ? -104.0f : x;          // e^-104 is 0 in float
  x = x > 89.0f ? 89.0f : x;              // e^89 is infinite
  const float rounded = x * log2_e + rounder;
  const float n = rounded - rounder;
  const float r = (x - n * log_2_high) - n * log_2_low;
  float y = 1.38368341e-3f;
  y = y * r + 8.37482233e-3f;
  y = y * r + 4.16682251e-2f;
  y = y * r + 1.66664198e-1f;
  y = y * r + 4.99999911e-1f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  // 2^n in two factors, because 2^128 and 2^-150 are no numbers in float.
  const uint32_t whole = bits_of(rounded) - bits_of(rounder) + 512;
  const uint32_t half = whole / 2;
  return y * float_of((half - 256 + 127) << 23) * float_of((whole - half - 256 + 127) << 23);
}
ALWAYS_INLINE double exponential(double x) { return std::exp(x); }

// An odd polynomial up to 1; 1 - e^-p(x) above.
ALWAYS_INLINE float error_function(float x) {
  const float a = std::abs(x), z = x * x;
  float inner = 7.88911930e-5f;
  inner = inner * z - 8.02084105e-4f;
  inner = inner * z + 5.18953521e-3f;
  inner = inner * z - 2.68544443e-2f;
  inner = inner * z + 1.12836003e-1f;
  inner = inner * z - 3.76126260e-1f;
  inner = inner * z + 1.12837911f;
  const float b = a > 4.0f ? 4.0f : a;
  float outer = -1.60759519e-4f;
  outer = outer * b + 2.71447026e-3f;
  outer = outer * b - 2.09761169e-2f;
  outer = outer * b + 1.01449683e-1f;
  outer = outer * b + 6.39893472e-1f;
  outer = outer * b + 1.12612820f;
  outer = outer * b + 5.56572923e-4f;
  const float far = std::copysign(1.0f - exponential(-outer), x);
  return a > 1.0f ? far : x * inner;
}
ALWAYS_INLINE double error_function(double x) { return std::erf(x); }

// An odd polynomial up to 0.625; 1 - 2 / (e^2x + 1) above.
ALWAYS_INLINE float hyperbolic_tangent(float x) {
  const float a = std::abs(x), z = x * x;
  float inner = -5.65998489e-3f;
  inner = inner * z + 2.05909833e-2f;
  inner = inner * z - 5.37210666e-2f;
  inner = inner * z + 1.33311272e-1f;
  inner = inner * z - 3.33332598e-1f;
  inner = inner * z + 1.0f;
  const float far = std::copysign(1.0f - 2.0f / (exponential(a + a) + 1.0f), x);
  return a > 0.625f ? far : x * inner;
}
ALWAYS_INLINE double hyperbolic_tangent(double x) { return std::tanh(x); }

template <typename T>
ALWAYS_INLINE T sigmoid(T x) {
  return T(1) / (T(1) + exponential(-x));
}

}  // namespace functions

// Random arrays, and comparisons with plain loops in higher precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "instruction_set.h"

// Each test runs the kernels on random arrays and ends the program at the first wrong number. `share`
// is the part of its trials to run.
void test_elementwise(double share);
void test_scan(double share);
void test_max_pool(double share);
void test_depthwise(double share);
void test_dense(double share);
void test_batch_norm(double share);
void test_rows(double share);
void test_gather(double share);
void test_product(double share);
void test_packed(double share);
void test_low_rank(double share);

inline std::mt19937 generator(0);

inline int64_t number_below(int64_t bound) {
  return std::uniform_int_distribution<int64_t>(0, bound - 1)(generator);
}

// The sanitizers see accesses outside of an array, which has exactly the size that a kernel may touch.
template <typename T>
std::unique_ptr<T[]> random_array(int64_t n) {
  std::unique_ptr<T[]> array(new T[size_t(n)]);
  for (int64_t i = 0; i < n; ++i) array[size_t(i)] = std::normal_distribution<T>()(generator);
  return array;
}

// Random arrays that live as long as this object.
template <typename T>
class Arrays {
 public:
  T* make(int64_t n) {
    arrays_.push_back(random_array<T>(n));
    return arrays_.back().get();
  }

 private:
  std::vector<std::unique_ptr<T[]>> arrays_;
};

// Return all instruction sets that this processor has.
inline std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
  for (InstructionSet set : {InstructionSet::BASELINE, InstructionSet::AVX2, InstructionSet::AVX512}) {
    if (set <= instruction_set()) sets.push_back(set);
  }
  return sets;
}

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("%s\n", what);
  std::exit(1);
}

inline void require_near(const char* what, double result, double expected, double error) {
  if (std::abs(result - expected) <= error) return;
  std::printf("%s: %.9g is more than %.3g from %.9g\n", what, result, error, expected);
  std::exit(1);
}

// A sum in double precision. The rounding errors of a sum in float grow with the sizes of its terms.
struct Sum {
  double value = 0, size = 0;

  Sum& operator+=(double term) {
    value += term;
    size += std::abs(term);
    return *this;
  }
};

// The nearest number of bfloat16.
inline double nearest_bfloat16(float number) {
  int exponent;
  const double fraction = std::frexp(double(number), &exponent);
  return std::ldexp(std::nearbyint(fraction * 256), exponent - 8);
}

constexpr double OF_SIZE = 3e-6;  // the error of a sum of some thousand terms

inline void require_sums(
    const char* what, const float* results, const std::vector<Sum>& sums, double of_size = OF_SIZE) {
  for (size_t i = 0; i < sums.size(); ++i) {
    require_near(what, double(results[i]), sums[i].value, of_size * sums[i].size);
  }
}

// A number in higher precision, and how far the number of type T may be from it after the same
// operations: a running analysis of rounding errors.
template <typename T>
struct Bounded {
  using Exact = long double;
  static constexpr Exact ROUNDING = std::numeric_limits<T>::epsilon();

  Exact value = 0, error = 0;

  Bounded() = default;
  Bounded(T number) : value(number) {}
  // A result whose operands change it by `from_operands`, and that is wrong by some roundings itself.
  Bounded(Exact result, Exact from_operands, Exact roundings = 1)
      : value(result),
        error(from_operands + roundings * ROUNDING * std::abs(result) +
              2 * Exact(std::numeric_limits<T>::min())) {
    const Exact most = std::numeric_limits<T>::max();
    if (!(std::abs(value) + error < most)) error = std::numeric_limits<Exact>::infinity();
  }

  bool is_known() const { return std::isfinite(value) && std::isfinite(error); }
};

// Require a number that is near enough. Return whether anything is known of it.
template <typename T>
bool require_bounded(const char* what, T result, const Bounded<T>& expected) {
  if (!expected.is_known()) return false;
  if (!(std::abs(result - expected.value) <= expected.error)) {
    require_near(what, double(result), double(expected.value), double(expected.error));
    require(false, what);  // nearer than double precision shows
  }
  return true;
}

template <typename T>
Bounded<T> operator+(const Bounded<T>& a, const Bounded<T>& b) {
  return {a.value + b.value, a.error + b.error};
}
template <typename T>
Bounded<T> operator-(const Bounded<T>& a) {
  return {-a.value, a.error, 0};
}
template <typename T>
Bounded<T> operator-(const Bounded<T>& a, const Bounded<T>& b) {
  return a + -b;
}
template <typename T>
Bounded<T> operator*(const Bounded<T>& a, const Bounded<T>& b) {
  const auto error = std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error;
  return {a.value * b.value, error};
}
template <typename T>
Bounded<T> operator/(const Bounded<T>& a, const Bounded<T>& b) {
  const auto least = std::abs(b.value) - b.error, result = a.value / b.value;
  const auto error = (a.error + std::abs(result) * b.error) / least;
  return {result, least > 0 ? error : std::numeric_limits<long double>::infinity()};
}
template <typename T>
Bounded<T> maximum(const Bounded<T>& a, const Bounded<T>& b) {
  return {std::max(a.value, b.value), std::max(a.error, b.error), 0};
}
template <typename T>
Bounded<T> minimum(const Bounded<T>& a, const Bounded<T>& b) {
  return -maximum(-a, -b);
}
// The nearest whole number, if every number within the error has the same one.
template <typename T>
Bounded<T> rounded(const Bounded<T>& a) {
  const auto result = std::nearbyint(a.value);
  const bool is_known =
      std::nearbyint(a.value - a.error) == result && std::nearbyint(a.value + a.error) == result;
  return {result, is_known ? 0 : std::numeric_limits<long double>::infinity(), 0};
}
template <typename T>
Bounded<T> square_root(const Bounded<T>& a) {
  const auto least = std::sqrt(a.value - a.error), result = std::sqrt(a.value);
  return {result, result > 0 ? a.error / (least + result) : std::sqrt(a.error) + least};
}

// The kernels compute these functions in float with a relative error of 2.5e-7, two roundings.
template <typename T>
Bounded<T> exponential(const Bounded<T>& a) {
  const auto result = std::exp(a.value);
  return {result, result * std::expm1(a.error), 4};
}
template <typename T>
Bounded<T> error_function(const Bounded<T>& a) {
  return {std::erf(a.value), 1.1284L * a.error, 4};
}
template <typename T>
Bounded<T> hyperbolic_tangent(const Bounded<T>& a) {
  return {std::tanh(a.value), a.error, 4};
}
template <typename T>
Bounded<T> sigmoid(const Bounded<T>& a) {
  return {1 / (1 + std::exp(-a.value)), a.error / 4, 4};
}

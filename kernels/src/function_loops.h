// Functions of each number of an array. They are compiled once for each instruction set.

template <typename F>
void apply_to_each(F f, const float* x, float* y, int64_t n) {
  INDEPENDENT for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
}

// Write y = f(x), where f is the function of a code. Return false if the code is that of no function.
bool apply_function(int64_t code, const float* x, float* y, int64_t n) {
  switch (code) {
    case EXP:
      apply_to_each([](float v) INLINE { return functions::exponential(v); }, x, y, n);
      return true;
    case ERF:
      apply_to_each([](float v) INLINE { return functions::error_function(v); }, x, y, n);
      return true;
    case TANH:
      apply_to_each([](float v) INLINE { return functions::hyperbolic_tangent(v); }, x, y, n);
      return true;
    case SIGMOID:
      apply_to_each([](float v) INLINE { return functions::sigmoid(v); }, x, y, n);
      return true;
    default: return false;
  }
}

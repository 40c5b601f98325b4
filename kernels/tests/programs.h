// The instructions of elementwise.h, in higher precision.
#pragma once

#include "check.h"
#include "elementwise.h"

// Return the result of one instruction for one element. `of` are its operands.
template <typename T>
Bounded<T> expected_result(int64_t code, const Bounded<T>* of) {
  using namespace elementwise;
  const Bounded<T>&a = of[0], &b = of[1], &c = of[2], &d = of[3], &e = of[4];
  const Bounded<T> zero(T(0)), one(T(1));
  switch (code) {
    case ADD: return a + b;
    case SUB: return a - b;
    case MUL: return a * b;
    case DIV: return a / b;
    case MAX: return maximum(a, b);
    case MIN: return minimum(a, b);
    case SQRT: return square_root(a);
    case NEG: return -a;
    case ABS: return maximum(a, -a);
    case RECIPROCAL: return one / a;
    case EXP: return exponential(a);
    case ERF: return error_function(a);
    case TANH: return hyperbolic_tangent(a);
    case SIGMOID: return sigmoid(a);
    case HARD_SIGMOID: return minimum(maximum(b * a + c, zero), one);
    case ROUND: return rounded(a);
    case CLIP: return minimum(maximum(a, b), c);
    case SCALE_ADD: return a * b + c;
    case SUB_SCALED: return a - b * c;
    case AVERAGE: return a * b + c * d;
    case AVERAGE_OF_SQUARES: return a * b + c * (d * d);
    case NORMALIZED_STEP: return a - b * c / (square_root(d) + e);
    case ROUNDED: return b * (minimum(maximum(rounded(a / b), c), d) + e);
    case STRAIGHT_THROUGH: {
      const Bounded<T> outside = minimum(maximum(b, d), e) - b;
      const Bounded<T> mask = minimum(maximum(of[5] * maximum(outside, -outside) + of[6], zero), one);
      return a * c * mask / c;
    }
    default: require(false, "an instruction has no expected result"); return zero;
  }
}

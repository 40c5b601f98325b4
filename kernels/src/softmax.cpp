#include "softmax.h"

#include <cmath>
#include <limits>

#include "functions.h"
#include "vectorized.h"

namespace softmax {

namespace {

ALWAYS_INLINE void compute_rows(const Masked& work, int64_t first, int64_t end) {
  const int64_t columns = work.columns;
  for (int64_t row = first; row < end; ++row) {
    const float* x = work.x + row * columns;
    float* RESTRICT y = work.y + row * columns;
    float largest[lanes::LANES], sums[lanes::LANES] = {};
    std::fill_n(largest, lanes::LANES, -std::numeric_limits<float>::infinity());
    lanes::for_each(columns, [&](int64_t i, int64_t lane) INLINE {
      largest[lane] = x[i] > largest[lane] ? x[i] : largest[lane];
    });
    const float most = *std::max_element(largest, largest + lanes::LANES);
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) y[i] = functions::exponential(x[i] - most);
    lanes::for_each(columns, [&](int64_t i, int64_t lane) INLINE { sums[lane] += y[i]; });
    const float sum = lanes::total(sums);
    if (std::isnan(sum)) {
      std::fill_n(y, columns, 0.0f);
      continue;
    }
    const float factor = 1.0f / sum;
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) y[i] *= factor;
  }
}

ALWAYS_INLINE void differentiate_rows(const Gradient& work, int64_t first, int64_t end) {
  const int64_t columns = work.columns;
  for (int64_t row = first; row < end; ++row) {
    const float *y = work.y + row * columns, *dy = work.dy + row * columns;
    float* RESTRICT dx = work.dx + row * columns;
    if (work.is_masked && std::all_of(y, y + columns, [](float n) { return n == 0.0f; })) {
      std::fill_n(dx, columns, std::nanf(""));
      continue;
    }
    float sums[lanes::LANES] = {};
    lanes::for_each(columns, [&](int64_t i, int64_t lane) INLINE { sums[lane] += dy[i] * y[i]; });
    const float sum = lanes::total(sums);
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) dx[i] = y[i] * (dy[i] - sum);
  }
}

}  // namespace

void compute(const Masked& work, int64_t task) {
  vectorized<compute_rows>(work, work.first(task), work.end(task));
}

void differentiate(const Gradient& work, int64_t task) {
  vectorized<differentiate_rows>(work, work.first(task), work.end(task));
}

}  // namespace softmax

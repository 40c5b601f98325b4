#include "softmax.h"

#include "vectorized.h"

namespace softmax {

namespace {

MULTIVERSIONED void differentiate_rows(const Gradient& work, int64_t first, int64_t end) {
  const int64_t columns = work.columns;
  for (int64_t row = first; row < end; ++row) {
    const float *y = work.y + row * columns, *dy = work.dy + row * columns;
    float sums[lanes::LANES] = {};
    lanes::for_each(columns, [&](int64_t i, int64_t lane) INLINE { sums[lane] += dy[i] * y[i]; });
    const float sum = lanes::total(sums);
    float* RESTRICT dx = work.dx + row * columns;
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) dx[i] = y[i] * (dy[i] - sum);
  }
}

}  // namespace

void differentiate(const Gradient& work, int64_t task) {
  const int64_t first = task * work.rows_per_task();
  differentiate_rows(work, first, std::min(first + work.rows_per_task(), work.rows));
}

}  // namespace softmax

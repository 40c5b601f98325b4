#include "layer_norm.h"

#include <cmath>

#include "vectorized.h"

namespace layer_norm {

namespace {

template <bool HAS_BIAS>
ALWAYS_INLINE void normalize_row(const Forward& work, int64_t row) {
  const int64_t columns = work.columns;
  const float *x = work.x + row * columns, *scale = work.scale, *bias = work.bias;
  float sums[lanes::LANES] = {}, squares[lanes::LANES] = {};
  lanes::for_each(columns, [&](int64_t i, int64_t lane) INLINE { sums[lane] += x[i]; });
  const float mean = lanes::total(sums) / float(columns);
  lanes::for_each(columns, [&](int64_t i, int64_t lane) INLINE {
    squares[lane] += (x[i] - mean) * (x[i] - mean);
  });
  const float variance = lanes::total(squares) / float(columns);
  const float inverse = 1.0f / std::sqrt(variance + work.epsilon);
  float* RESTRICT y = work.y + row * columns;
  INDEPENDENT for (int64_t i = 0; i < columns; ++i) {
    y[i] = (x[i] - mean) * inverse * scale[i] + (HAS_BIAS ? bias[i] : 0.0f);
  }
  if (work.mean) work.mean[row] = mean;
  if (work.inverse) work.inverse[row] = inverse;
}

ALWAYS_INLINE void normalize_rows(const Forward& work, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) {
    if (work.bias) normalize_row<true>(work, row);
    else normalize_row<false>(work, row);
  }
}

// dx = (dn - mean of dn - (x - mean) mean of dn (x - mean) / variance) / deviation, dn = dy scale
template <bool HAS_PARTS>
ALWAYS_INLINE void differentiate_row(
    const Gradient& work, int64_t row, float* RESTRICT dscale, float* RESTRICT dbias) {
  const int64_t columns = work.columns;
  const float *x = work.x + row * columns, *dy = work.dy + row * columns, *scale = work.scale;
  const float mean = work.mean[row], inverse = work.inverse[row];
  float sums[lanes::LANES] = {}, products[lanes::LANES] = {};
  lanes::for_each(columns, [&](int64_t i, int64_t lane) INLINE {
    const float centred = x[i] - mean, dn = dy[i] * scale[i];
    sums[lane] += dn;
    products[lane] += dn * centred;
    if (HAS_PARTS) {
      dscale[i] += dy[i] * centred * inverse;
      dbias[i] += dy[i];
    }
  });
  const float mean_dn = lanes::total(sums) / float(columns);
  const float slope = lanes::total(products) / float(columns) * (inverse * inverse);
  float* RESTRICT dx = work.dx + row * columns;
  INDEPENDENT for (int64_t i = 0; i < columns; ++i) {
    dx[i] = (dy[i] * scale[i] - mean_dn - (x[i] - mean) * slope) * inverse;
  }
}

ALWAYS_INLINE void differentiate_rows(const Gradient& work, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) differentiate_row<false>(work, row, nullptr, nullptr);
}

ALWAYS_INLINE void differentiate_rows_and_weights(
    const Gradient& work, int64_t first, int64_t end, float* dscale) {
  for (int64_t row = first; row < end; ++row) {
    differentiate_row<true>(work, row, dscale, dscale + work.columns);
  }
}

}  // namespace

void normalize(const Forward& work, int64_t task) {
  vectorized<normalize_rows>(work, work.first(task), work.end(task));
}

void differentiate(const Gradient& work, int64_t task) {
  const int64_t first = work.first(task), end = work.end(task);
  if (work.parts) {
    vectorized<differentiate_rows_and_weights>(work, first, end, work.parts + task * 2 * work.columns);
  } else {
    vectorized<differentiate_rows>(work, first, end);
  }
}

void add_parts(const Gradient& work, float* dscale, float* dbias) {
  const int64_t columns = work.columns;
  vectorized<lanes::add_rows>(work.parts, 2 * columns, work.tasks(), columns, dscale);
  vectorized<lanes::add_rows>(work.parts + columns, 2 * columns, work.tasks(), columns, dbias);
}

}  // namespace layer_norm

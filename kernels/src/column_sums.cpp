#include "column_sums.h"

#include "lanes.h"

namespace column_sums {

namespace {

ALWAYS_INLINE void add_block(
    const float* x, int64_t pitch, int64_t rows, int64_t columns, float* RESTRICT sums) {
  std::fill_n(sums, columns, 0.0f);
  // Four rows at a time, so that the sums are read and written less often.
  for (; rows >= 4; rows -= 4, x += 4 * pitch) {
    const float *a = x, *b = x + pitch, *c = x + 2 * pitch, *d = x + 3 * pitch;
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) sums[i] += (a[i] + b[i]) + (c[i] + d[i]);
  }
  for (; rows > 0; --rows, x += pitch) {
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) sums[i] += x[i];
  }
}

}  // namespace

void add_rows(const Work& work, int64_t task) {
  const int64_t row = task / work.column_parts() * work.rows_per_task();
  const int64_t column = task % work.column_parts() * work.columns_per_task();
  const int64_t rows = std::min(work.rows_per_task(), work.rows - row);
  const int64_t columns = std::min(work.columns_per_task(), work.columns - column);
  float* sums = work.parts + task / work.column_parts() * work.columns + column;
  vectorized<add_block>(work.x + row * work.columns + column, work.columns, rows, columns, sums);
}

void add_parts(const Work& work, float* sums) {
  vectorized<lanes::add_rows>(work.parts, work.columns, work.row_parts(), work.columns, sums);
}

}  // namespace column_sums

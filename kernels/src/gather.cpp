#include "gather.h"

#include <type_traits>
#include <vector>

#include "vectorized.h"

namespace gather {

namespace {

// With this many columns or more, it takes less time to copy the rows that no index has than to
// subtract zeros from them.
constexpr int64_t MIN_COLUMNS = 8;

// Call function(row of the range, position) for each index in a range of rows.
template <typename Index, typename Function>
ALWAYS_INLINE void for_each_index(
    const Gradient<Index>& work, int64_t first, int64_t end, const Function& function) {
  for (int64_t i = 0; i < work.count; ++i) {
    const int64_t index = work.indices[i];
    const int64_t row = index < 0 ? index + work.rows : index;
    if (row >= first && row < end) function(row - first, i);
  }
}

// Add a row, or its product with a factor, to the sum so far; to zeros, if it is the first, so that -0
// becomes 0.
template <bool IS_FIRST>
ALWAYS_INLINE void add_row(
    float* RESTRICT sum, const float* row, const float* factor, int64_t columns) {
  if (factor) {
    const float scale = *factor;
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) {
      sum[i] = (IS_FIRST ? 0.0f : sum[i]) + scale * row[i];
    }
  } else {
    INDEPENDENT for (int64_t i = 0; i < columns; ++i) sum[i] = (IS_FIRST ? 0.0f : sum[i]) + row[i];
  }
}

ALWAYS_INLINE void subtract_from(float* RESTRICT sum, const float* from, int64_t columns) {
  INDEPENDENT for (int64_t i = 0; i < columns; ++i) sum[i] = from[i] - sum[i];
}

template <typename Index>
ALWAYS_INLINE void differentiate_range(const Gradient<Index>& work, int64_t task) {
  const int64_t columns = work.columns, tasks = work.tasks();
  const int64_t first = work.rows * task / tasks, end = work.rows * (task + 1) / tasks;
  float* result = work.result + first * columns;
  const float* table = work.table ? work.table + first * columns : nullptr;
  const auto add = [&](auto is_first, int64_t row, int64_t i) INLINE {
    const float* factor = work.factors ? work.factors + i : nullptr;
    add_row<is_first()>(result + row * columns, work.dy + i * columns, factor, columns);
  };
  if (!table || columns < MIN_COLUMNS) {
    std::fill_n(result, (end - first) * columns, 0.0f);
    for_each_index(work, first, end, [&](int64_t row, int64_t i) INLINE {
      add(std::false_type{}, row, i);
    });
    if (table) subtract_from(result, table, (end - first) * columns);
    return;
  }
  std::vector<unsigned char> has_gradient(static_cast<size_t>(end - first), 0);
  for_each_index(work, first, end, [&](int64_t row, int64_t i) INLINE {
    if (has_gradient[row]) {
      add(std::false_type{}, row, i);
    } else {
      add(std::true_type{}, row, i);
      has_gradient[row] = 1;
    }
  });
  // The next row, from one on, that has a gradient, or has none.
  const auto next_row = [&](int64_t row, unsigned char has_one) INLINE {
    while (row < end - first && has_gradient[row] != has_one) ++row;
    return row;
  };
  for (int64_t row = 0; row < end - first;) {
    const int64_t next = next_row(row, 1);
    std::copy_n(table + row * columns, (next - row) * columns, result + row * columns);
    row = next_row(next, 0);
    subtract_from(result + next * columns, table + next * columns, (row - next) * columns);
  }
}

template <typename Index>
bool all_in_range(const Gradient<Index>& work) {
  return std::all_of(work.indices, work.indices + work.count, [&](int64_t index) {
    return index >= -work.rows && index < work.rows;
  });
}

ALWAYS_INLINE void add_two(
    float* RESTRICT sum, const float* row, const float* other, int64_t columns) {
  INDEPENDENT for (int64_t i = 0; i < columns; ++i) sum[i] = row[i] + other[i];
}

}  // namespace

template <typename Index>
Rows::Rows(const Gradient<Index>& work)
    : rows_(size_t(work.rows), nullptr), sums_(work.count / 2 * work.columns) {
  // A row that one index has stays where it is. There is a sum for each other row.
  float* free = sums_.data();
  std::vector<unsigned char> has_sum(size_t(work.rows), 0);
  for (int64_t i = 0; i < work.count; ++i) {
    const float* dy = work.dy + i * work.columns;
    const int64_t index = work.indices[i];
    const size_t row = size_t(index < 0 ? index + work.rows : index);
    if (!rows_[row]) {
      rows_[row] = dy;
    } else if (has_sum[row]) {
      float* sum = sums_.data() + (rows_[row] - sums_.data());
      vectorized<add_row<false>>(sum, dy, static_cast<const float*>(nullptr), work.columns);
    } else {
      vectorized<add_two>(free, rows_[row], dy, work.columns);
      rows_[row] = free;
      has_sum[row] = 1;
      free += work.columns;
    }
  }
}

template Rows::Rows(const Gradient<int32_t>&);
template Rows::Rows(const Gradient<int64_t>&);

bool are_in_range(const Gradient<int32_t>& work) { return all_in_range(work); }
bool are_in_range(const Gradient<int64_t>& work) { return all_in_range(work); }

void differentiate(const Gradient<int32_t>& work, int64_t task) {
  vectorized<differentiate_range<int32_t>>(work, task);
}
void differentiate(const Gradient<int64_t>& work, int64_t task) {
  vectorized<differentiate_range<int64_t>>(work, task);
}

}  // namespace gather

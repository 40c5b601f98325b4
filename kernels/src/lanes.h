// Sums over a row in lanes, which become vector instructions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectorized.h"

namespace lanes {

constexpr int64_t LANES = 16;

// Call function(i, the lane of i) for i = 0, ..., n - 1.
template <typename Function>
ALWAYS_INLINE void for_each(int64_t n, const Function& function) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    ROLLED for (int64_t lane = 0; lane < LANES; ++lane) function(i + lane, lane);
  }
  INDEPENDENT for (int64_t lane = 0; lane < n - i; ++lane) function(i + lane, lane);
}

// Return the sum of all lanes, and overwrite them.
ALWAYS_INLINE float total(float* sums) {
  for (int64_t half = LANES / 2; half; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

// The number of rows in a task: many enough to be worth a thread's start.
inline int64_t rows_per_task(int64_t columns, int64_t least) {
  constexpr int64_t elements = 8192;
  return std::max(least, elements / std::max<int64_t>(columns, 1));
}

}  // namespace lanes

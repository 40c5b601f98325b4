#include "low_rank.h"

#include <cstring>

#include "vectorized.h"

namespace low_rank {

namespace {

constexpr int64_t BLOCK = 64;  // rows at a time: 32 take 1.04 times as long

#define LOOPS "low_rank_loops.h"
#include "each_instruction_set.h"

}  // namespace

void differentiate([[maybe_unused]] const Gradient& work, [[maybe_unused]] int64_t task) {
#ifdef HAS_LOOPS
  const auto add_block = OF_INSTRUCTION_SET(work.instructions, add_block);
  float* sums = work.parts + task * work.part();
  std::fill_n(sums, work.part(), 0.0f);
  const int64_t first = task * work.rows_per_task();
  const int64_t end = std::min(first + work.rows_per_task(), work.rows);
  for (int64_t row = first; row < end; row += BLOCK) {
    add_block(work, row, std::min(BLOCK, end - row), sums);
  }
#endif
}

void add_parts(const Gradient& work, float* da, float* db) {
  const float* part = work.parts;
  for (size_t i = 0; i < 2; ++i) {
    const int64_t columns = work.factors[i].columns;
    float* result = i ? db : da;
    std::fill_n(result, work.rank * columns, 0.0f);
    for (int64_t task = 0; task < work.tasks(); ++task) {
      const float* numbers = part + task * work.part();
      INDEPENDENT for (int64_t j = 0; j < work.rank * columns; ++j) result[j] += numbers[j];
    }
    part += work.padded_rank() * columns;
  }
}

}  // namespace low_rank

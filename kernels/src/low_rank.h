// The gradients of the two factors of a product of low rank, x a' b scaled, as beside a LoRA adapter:
//
//     u = scale x a'    v = scale dy b'    da = v' x    db = u' dy
//
// x and dy are large, and u and v have few columns. A block of rows is read once: u and v of the block
// stay in the cache until they are multiplied by its rows.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "tiles.h"

namespace low_rank {

constexpr int64_t MAX_RANK = 64;
constexpr int64_t COLUMNS = 16;  // x and dy have a multiple of these: all vectors are whole
constexpr int64_t RANKS = 4;     // of a tile of sums

struct Factor {
  const float* rows;    // x or dy
  int64_t columns;
  const float* matrix;  // a or b: (padded rank, columns)
};

struct Gradient {
  int64_t rows, rank;
  float scale;
  std::array<Factor, 2> factors;
  // The sums of each task, whose number does not depend on the threads: da, and then db.
  float* parts;
  InstructionSet instructions = instruction_set();

  int64_t padded_rank() const { return tiles::round_up(rank, RANKS); }
  int64_t part() const { return padded_rank() * (factors[0].columns + factors[1].columns); }
  int64_t rows_per_task() const { return std::max<int64_t>(256, tiles::divide_up(rows, 8)); }
  int64_t tasks() const { return tiles::divide_up(rows, rows_per_task()); }
};

// Compute the sums of the rows of one task.
void differentiate(const Gradient& work, int64_t task);

// Add up the sums of all tasks in their order.
void add_parts(const Gradient& work, float* da, float* db);

}  // namespace low_rank

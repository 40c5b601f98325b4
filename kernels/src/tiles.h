// The innermost loops of products, compiled for several instruction sets.
//
//     sums[row][column] = sum over steps of frame[offset of step + offset of row] panel[step][column]
//
// A tile of sums stays in registers for many steps; a step reads some vectors of the panel and one
// number of the frame for each row of the tile (Georganas et al. 2018, "Anatomy of high-performance
// deep learning convolutions on SIMD architectures"; Goto and van de Geijn 2008, "Anatomy of
// high-performance matrix multiplication").
#pragma once

#include <cstdint>
#include <vector>

#include "instruction_set.h"

namespace tiles {

// The offsets of a step in the frame and in the panel.
struct Step {
  int64_t frame, panel;
};

struct Functions {
  int lanes, max_vectors;
  int (*rows_of_tile)(int vectors);
  void (*pack)(
      const float* from, const float* end, const int64_t* numbers, int64_t count, int64_t pitch,
      int64_t columns, int64_t width, float* panel);
  // The rows fill whole tiles. If `are_first`, the products replace the sums.
  void (*add_products)(
      const float* frame, const std::vector<int64_t>& rows, const Step* steps, int64_t count,
      const float* panel, int64_t width, bool are_first, float* sums);
  void (*unpack)(
      const float* sums, const int64_t* places, int64_t rows, const float* bias, int64_t columns,
      int64_t width, int64_t pitch, float* to);
  void (*pair_rows)(
      const float* first, const float* second, int64_t from_pitch, float* to, int64_t to_pitch,
      int64_t rows, int64_t n);

  // The numbers of a row of tiles: as few as possible beyond the columns, then as many as possible.
  int64_t width_for(int64_t columns) const;
  // Fill up the last tile with copies of a row.
  void pad(std::vector<int64_t>& rows, int64_t width) const;
};

// Return the functions of an instruction set that is not NONE.
const Functions& functions_of(InstructionSet instructions);

// The same for frames and panels of pairs, as in bfloat16.h. `pairs`: instructions for them, if any.
const Functions& pair_functions_of(InstructionSet instructions, PairInstructions pairs);

constexpr int64_t divide_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t n, int64_t factor) { return divide_up(n, factor) * factor; }

}  // namespace tiles

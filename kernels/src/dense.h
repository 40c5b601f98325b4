// Convolutions of images and their gradients: each filter reads all channels.
//
// All three directions are sums of products of two tables, whose innermost loops are those of tiles.h:
//
//                  rows                columns    steps               table of rows   of columns
//     forward      windows             filters    channels and taps   x               w
//     transposed   pixels              channels   filters and taps    dy              w
//     weights      channels and taps   filters    windows             x               dy
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "axes.h"
#include "tiles.h"

namespace dense {

using convolution::Axes;
using convolution::Axis;

enum class Direction { FORWARD, TRANSPOSED, WEIGHTS };  // y of x, w, bias; dx of dy, w, bias; dw of x, dy

struct Work {
  Axes axes;
  int64_t images, channels, filters;
  const float *x, *w, *bias, *dy;  // those that a direction reads; bias may be missing
  float* result;
  InstructionSet instructions = instruction_set();
  // Whether the numbers of both tables are rounded to bfloat16: then a step is a pair of steps.
  bool has_pairs = false;
  PairInstructions pair_instructions = ::pair_instructions();

  // Return the functions that multiply the tables.
  const tiles::Functions& functions() const {
    return has_pairs ? tiles::pair_functions_of(instructions, pair_instructions)
                     : tiles::functions_of(instructions);
  }
  int64_t taps() const { return axes[0].kernel * axes[1].kernel; }
};

// How a direction is computed: in stages, whose tasks can run at the same time. The results do not
// depend on the number of threads.
class Algorithm {
 public:
  virtual ~Algorithm() = default;

  virtual std::vector<int64_t> tasks_of_stages() const = 0;
  // Run one task. It may throw std::bad_alloc.
  virtual void run(size_t stage, int64_t task) = 0;
};

// Each product of a number of one table and a number of the other is computed.
std::unique_ptr<Algorithm> direct(const Work& work, Direction direction);

// Fewer products, of sums of the numbers.
std::unique_ptr<Algorithm> winograd(const Work& work, Direction direction);
bool has_winograd(const Axes& axes);  // the pixels and windows do not matter

// The first element of a part of a range, and the one after its last.
struct Range {
  int64_t first, end;

  static Range of(int64_t group, int64_t size, int64_t total) {
    return {group * size, std::min((group + 1) * size, total)};
  }

  int64_t size() const { return end - first; }
};

}  // namespace dense

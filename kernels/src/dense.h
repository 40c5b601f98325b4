// Convolutions of images and their gradients: each filter reads all channels.
//
// All three directions are sums of products of two tables,
//
//     sums[row][column] = sum over steps of frame[offset of step + offset of row] panel[step][column]
//
//                  rows                columns    steps               frame   panel
//     convolve     windows             filters    channels and taps   x       w
//     transposed   pixels              channels   filters and taps    dy      w
//     weights      channels and taps   filters    windows             x       dy
//
// The frame holds the images with zeros around them. The innermost loops are those of tiles.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "axes.h"
#include "tiles.h"

namespace dense {

using convolution::Axes;
using convolution::Axis;
using tiles::InstructionSet;

struct Work {
  Axes axes;
  int64_t images, channels, filters;
  const float *x, *w, *bias, *dy;  // those that a direction reads; bias may be missing
  float* result;
  InstructionSet instructions = tiles::instruction_set();

  int64_t taps() const { return axes[0].kernel * axes[1].kernel; }
};

// How a direction is divided into tasks. The results do not depend on the number of threads.
struct Tasks {
  int64_t column_blocks, image_groups, row_groups;
  int64_t columns_per_block, images_per_group, rows_per_group;  // rows: of results, or channels

  int64_t count() const { return column_blocks * image_groups * row_groups; }
};

Tasks tasks_of_convolve(const Work& work);
Tasks tasks_of_transposed(const Work& work);

// Compute the result of one task. They may throw std::bad_alloc.
void convolve(const Work& work, const Tasks& tasks, int64_t task);             // y of x, w, bias
void convolve_transposed(const Work& work, const Tasks& tasks, int64_t task);  // dx of dy, w, bias

// The gradient of weights, dw of x and dy: first the sums over each group of images, then over all.
struct WeightSums {
  const Work& work;
  Tasks tasks;

  explicit WeightSums(const Work& work);

  // Compute the sums of one task of `tasks`.
  void add(int64_t task);
  // Add the sums of all groups of images, and write a part of dw.
  void write(int64_t task);
  int64_t writes() const { return tasks.column_blocks * tasks.row_groups; }

 private:
  std::vector<float> elements;
  size_t elements_of_task;
};

}  // namespace dense

#include "product.h"

#include <cstring>
#include <thread>

#include "buffer.h"

namespace product {

namespace {

constexpr int64_t MAX_ROWS = 384, MAX_COLUMNS = 256;  // of a block, whose panels stay in the cache
constexpr int64_t MIN_ROWS = 48, MIN_COLUMNS = 64;
constexpr int64_t STEPS = 256;  // at a time: their panels stay in the cache
// The sizes of tiles of sums, which depend on the instruction set.
constexpr int64_t MIN_TILE = 6, MAX_TILE = 8, WHOLE_TILES = 24;  // rows
constexpr int64_t MIN_WIDTH = 16, MAX_WIDTH = 32;                // columns
constexpr int64_t IN_LINE = 16;  // numbers in a line of the cache

// Return the distance of arrays of a size that are written in turns: their first numbers must not all
// have the same place in the cache.
constexpr int64_t padded(int64_t size) { return size + IN_LINE; }

// Where the sums of a tile go, and what is added to them.
struct Target {
  float* y;
  int64_t pitch;
  float alpha;
  bool has_relu;
  size_t addends;
  const float* addend[MAX_ADDENDS];
  int64_t addend_pitch[MAX_ADDENDS];
  float* partial;  // sums of some of the steps
  int64_t partial_pitch;
  bool is_first, is_last;  // whether the steps are
};

// The first elements of a block of each matrix.
struct Block {
  const float *a, *b;
  float* y;
  const float* addend[MAX_ADDENDS];
  int64_t rows, columns;
};

#define LOOPS "product_loops.h"
#include "each_instruction_set.h"

#ifdef HAS_LOOPS
// The memory of a task.
struct Memory {
  int64_t panels, frames, partial;  // numbers
  Buffer buffer;

  Memory(const Work& work, const Block& block) {
    const int64_t steps = std::min(STEPS, work.sizes.steps);
    const int64_t width = tiles::round_up(block.columns, MAX_WIDTH);
    panels = tiles::divide_up(width, MIN_WIDTH) * padded(steps * MAX_WIDTH);
    frames = work.reads_rows() ? 0 : tiles::divide_up(block.rows, MIN_TILE) * padded(steps * MAX_TILE);
    partial = steps < work.sizes.steps ? block.rows * width : 0;
    buffer = Buffer(panels + frames + partial);
  }
};
#endif

// Return the time of a product, in products of numbers.
double time_of(const Work& work, const Blocks& blocks) {
  static const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  // Other threads take some microseconds to start.
  constexpr double start = 1 << 18;
  // A number of b is copied in the time of so many products, for all rows of a block.
  constexpr double copy_b = 8, copy_a = 4;
  const int64_t tasks = blocks.count(work.sizes);
  const double copies = copy_b / double(blocks.rows) +
                        (work.reads_rows() ? 0 : copy_a / double(blocks.columns));
  const double block = double(blocks.rows * blocks.columns * work.sizes.steps) * (1 + copies);
  // A thread that is interrupted leaves its other tasks to the others.
  const double waiting = 0.01 * double(threads) / double(tasks);
  return double(tiles::divide_up(tasks, threads)) * block * (1 + waiting) + (tasks > 1 ? start : 0);
}

}  // namespace

Blocks fastest_blocks(const Work& work) {
  const Sizes& sizes = work.sizes;
  constexpr int64_t most = 64;  // parts of an axis beyond the fewest ones
  const int64_t rows = tiles::divide_up(sizes.rows, MAX_ROWS);
  const int64_t columns = tiles::divide_up(sizes.columns, MAX_COLUMNS);
  Blocks best;
  double least = 0;
  for (int64_t i = rows; i <= rows + most; ++i) {
    for (int64_t j = columns; j <= columns + most; ++j) {
      const Blocks blocks{
          tiles::round_up(tiles::divide_up(sizes.rows, i), WHOLE_TILES),
          tiles::round_up(tiles::divide_up(sizes.columns, j), MAX_WIDTH)};
      if ((i > rows && blocks.rows < MIN_ROWS) || (j > columns && blocks.columns < MIN_COLUMNS)) break;
      const double time = time_of(work, blocks);
      if (!best.rows || time < least) {
        best = blocks;
        least = time;
      }
    }
  }
  return best;
}

void multiply([[maybe_unused]] const Work& work, [[maybe_unused]] int64_t task) {
#ifdef HAS_LOOPS
  const Sizes& sizes = work.sizes;
  const Blocks& blocks = work.blocks;
  const auto next_index = [&task](int64_t count) {
    const int64_t index = task % count;
    task /= count;
    return index;
  };
  const int64_t row = next_index(blocks.along_rows(sizes)) * blocks.rows;
  const int64_t column = next_index(blocks.along_columns(sizes)) * blocks.columns;
  std::array<int64_t, BATCH_AXES> indices;
  for (size_t i = BATCH_AXES; i-- > 0;) indices[i] = next_index(sizes.batch[i]);
  Block block{};
  block.rows = std::min(blocks.rows, sizes.rows - row);
  block.columns = std::min(blocks.columns, sizes.columns - column);
  block.a = work.a.of(indices) + row * work.a.view.row;
  block.b = work.b.of(indices) + column * work.b.view.column;
  block.y = work.y.of(indices) + row * work.y.view.row + column;
  for (size_t i = 0; i < work.addends; ++i) {
    block.addend[i] = work.addend[i].of(indices) + row * work.addend[i].view.row + column;
  }
  const Memory memory(work, block);
  float* panels = memory.buffer.data();
  float* frames = panels + memory.panels;
  const bool has_avx512 = work.instructions == tiles::InstructionSet::AVX512;
  const auto multiply_block = has_avx512 ? avx512::multiply_block : avx2::multiply_block;
  multiply_block(work, block, panels, frames, frames + memory.frames);
#endif
}

}  // namespace product

#include "product.h"

#include <cstring>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>

#include "buffer.h"
#include "vectorized.h"

namespace product {

namespace {

constexpr int64_t MAX_ROWS = 384, MAX_COLUMNS = 256;  // of a block, whose panels stay in the cache
constexpr int64_t MIN_ROWS = 48, MIN_COLUMNS = 64;
constexpr int64_t STEPS = 256;  // at a time: their panels stay in the cache
constexpr int64_t IN_LINE = 16;  // numbers in a line of the cache
constexpr int64_t MAX_LANES = 16;  // of a vector

// Return the distance of arrays of a size that are written in turns: each starts at a line of the cache,
// and their first numbers must not all have the same place in it.
constexpr int64_t padded(int64_t size) { return tiles::round_up(size, IN_LINE) + IN_LINE; }

// Return the rows that are copied to frames at a time: some lines of the cache, and whole tiles.
constexpr int64_t frame_rows(Tile tile) { return 4 * std::lcm(tile.rows, IN_LINE); }

// Where sums go, and what is added to them.
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

  // Return the target of the sums from a row and a column on.
  Target at(int64_t row, int64_t column) const {
    Target moved = *this;
    moved.y += row * pitch + column;
    if (partial) moved.partial += row * partial_pitch + column;
    for (size_t i = 0; i < addends; ++i) moved.addend[i] += row * addend_pitch[i] + column;
    return moved;
  }
};

// The first elements of a block of each matrix.
struct Block {
  const float *a, *b;
  float* y;
  const float* addend[MAX_ADDENDS];
  int64_t rows, columns;
};

// Return where the sums of a block go.
[[maybe_unused]] Target target_of(const Work& work, const Block& block) {
  Target to{};
  to.y = block.y;
  to.pitch = work.y.view.row;
  to.alpha = work.alpha;
  to.has_relu = work.has_relu;
  to.addends = work.addends;
  for (size_t i = 0; i < work.addends; ++i) {
    to.addend[i] = block.addend[i];
    to.addend_pitch[i] = work.addend[i].view.row;
  }
  return to;
}

// Return the pairs of a line of so many steps, which are filled up with zeros.
constexpr int64_t pairs_for(int64_t steps) {
  return tiles::round_up(tiles::divide_up(steps, 2), bfloat16::PAIRS);
}

// Return the size of a panel of so many steps.
constexpr int64_t pair_panel(int64_t steps) { return padded(pairs_for(steps) * bfloat16::COLUMNS); }

// The memory of a task whose factors are rounded to bfloat16: rows of a, panels of b, and sums of some of
// the steps. The factors may have a second part, what rounding takes off them.
struct PairMemory {
  int64_t all_rows, all_columns;  // with those that are filled up
  int64_t pitch;                  // of rows
  int64_t panel_size, sums_size;
  Buffer buffer;

  PairMemory(const Work& work, const Block& block, int64_t rows_of_tile) {
    const int64_t pairs = pairs_for(std::min(STEPS, work.sizes.steps));
    const int64_t parts = work.precision == Precision::BF16X3 ? 2 : 1;
    pitch = padded(pairs);
    all_rows = tiles::round_up(tiles::round_up(block.rows, rows_of_tile), MAX_LANES);
    all_columns = tiles::round_up(block.columns, bfloat16::COLUMNS);
    panel_size = padded(pairs * bfloat16::COLUMNS);
    // The tiles of the last rows may be higher where sums are finished.
    sums_size = padded((all_rows + tile_of(work.instructions).rows) * bfloat16::COLUMNS);
    const int64_t panels = all_columns / bfloat16::COLUMNS;
    rows_ = panels * sums_size;
    panels_ = rows_ + parts * all_rows * pitch;
    buffer = Buffer(panels_ + parts * panels * panel_size);
  }

  float* sums(int64_t column) const { return buffer.data() + column / bfloat16::COLUMNS * sums_size; }
  float* row(int64_t part, int64_t row) const { return buffer.data() + rows_ + (part * all_rows + row) * pitch; }
  float* panel(int64_t part, int64_t column) const {
    return buffer.data() + panels_ + (part * all_columns + column) / bfloat16::COLUMNS * panel_size;
  }

 private:
  int64_t rows_, panels_;
};

#define LOOPS "product_loops.h"
#include "each_instruction_set.h"

#ifdef HAS_LOOPS
// Return the instructions that multiply the pairs of a product.
const bfloat16::Multiplier& multiplier_of(const Work& work) {
  return work.multiplier ? *work.multiplier : OF_INSTRUCTION_SET(work.instructions, MULTIPLIER);
}
#endif

// Return the tile of a product: of sums of pairs, if its factors are rounded to bfloat16.
Tile tile_of_work(const Work& work) {
#ifdef HAS_LOOPS
  if (work.precision != Precision::FLOAT32) return {multiplier_of(work).rows, bfloat16::COLUMNS};
#endif
  return tile_of(work.instructions);
}

#ifdef HAS_LOOPS
// The memory of a task.
struct Memory {
  int64_t panels, frames, partial;  // numbers
  Buffer buffer;

  Memory(const Work& work, const Block& block) {
    const int64_t steps = std::min(STEPS, work.sizes.steps);
    const Tile tile = tile_of_work(work);
    const int64_t count = tiles::divide_up(block.columns, tile.columns);
    panels = count * padded(steps * tile.columns);
    const int64_t in_frames = std::min(block.rows, frame_rows(tile));
    frames = work.reads_rows() ? 0 : tiles::divide_up(in_frames, tile.rows) * padded(steps * tile.rows);
    const int64_t rows = tiles::round_up(block.rows, tile.rows);
    partial = steps < work.sizes.steps ? rows * count * tile.columns : 0;
    buffer = Buffer(panels + frames + partial);
  }
};

// Return the first number of an axis in one of its parts; the size of the axis for the part after the
// last one.
int64_t first_of(int64_t part, int64_t parts, int64_t size, int64_t tile) {
  return std::min(part * tiles::divide_up(size, tile) / parts * tile, size);
}

// Return the block of a task. Each thread of onnxruntime takes adjacent tasks and so computes adjacent
// rows, as in the operators before and after a product: its processor has them in its caches.
Block block_of(const Work& work, int64_t task) {
  const Sizes& sizes = work.sizes;
  const Tile tile = tile_of_work(work);
  const auto next_index = [&task](int64_t count) {
    const int64_t index = task % count;
    task /= count;
    return index;
  };
  // The first number of a block along an axis, and how many it has.
  const auto next_part = [&](int64_t parts, int64_t size, int64_t of_tile) {
    const int64_t part = next_index(parts), first = first_of(part, parts, size, of_tile);
    return std::pair{first, first_of(part + 1, parts, size, of_tile) - first};
  };
  Block block{};
  int64_t row, column;
  std::tie(column, block.columns) = next_part(work.parts.columns, sizes.columns, tile.columns);
  std::tie(row, block.rows) = next_part(work.parts.rows, sizes.rows, tile.rows);
  std::array<int64_t, BATCH_AXES> indices;
  for (size_t i = BATCH_AXES; i-- > 0;) indices[i] = next_index(sizes.batch[i]);
  block.a = work.a.of(indices) + row * work.a.view.row;
  block.b = work.b.of(indices) + column * work.b.view.column;
  block.y = work.y.of(indices) + row * work.y.view.row + column;
  for (size_t i = 0; i < work.addends; ++i) {
    block.addend[i] = work.addend[i].of(indices) + row * work.addend[i].view.row + column;
  }
  return block;
}
#endif

// Return the numbers of an axis in its largest part.
int64_t largest_of(int64_t parts, int64_t size, int64_t tile) {
  return tiles::divide_up(tiles::divide_up(size, tile), parts) * tile;
}

// Return the time of a product, in products of numbers.
double time_of(const Work& work, const Parts& parts, int64_t threads) {
  // Other threads take some microseconds to start.
  constexpr double start = 1 << 18;
  // A number of b is copied in the time of so many products, for all rows of a block.
  constexpr double copy_b = 8, copy_a = 4;
  const Sizes& sizes = work.sizes;
  // Threads that write parts of the same rows wait for each other's lines, longest if they share no
  // cache: for each number of a result as long as for so many products.
  constexpr double wait = 40;
  const bool shares_rows = sizes.products() * parts.rows % threads != 0;
  const auto time_of_block = [&](double rows, double columns) {
    const double copies = copy_b / rows + (work.reads_rows() ? 0 : copy_a / columns);
    return rows * columns * (double(sizes.steps) * (1 + copies) + (shares_rows ? wait : 0));
  };
  const Tile tile = tile_of_work(work);
  const double largest = time_of_block(
      double(largest_of(parts.rows, sizes.rows, tile.rows)),
      double(largest_of(parts.columns, sizes.columns, tile.columns)));
  const double mean = time_of_block(
      double(sizes.rows) / double(parts.rows), double(sizes.columns) / double(parts.columns));
  const int64_t tasks = sizes.products() * parts.rows * parts.columns;
  // A thread that is interrupted leaves its other tasks to the others.
  const double waiting = 0.01 * double(threads) / double(tasks);
  const double time = double(tiles::divide_up(tasks, threads) - 1) * mean + largest;
  return time * (1 + waiting) + (tasks > 1 ? start : 0);
}

}  // namespace

Tile tile_of([[maybe_unused]] InstructionSet instructions) {
#ifdef HAS_LOOPS
  return OF_INSTRUCTION_SET(instructions, SIZE);
#else
  return {1, 1};
#endif
}

Parts fastest_parts(const Work& work) {
  static const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  const Sizes& sizes = work.sizes;
  const Tile tile = tile_of_work(work);
  constexpr int64_t most = 64;  // parts of an axis beyond the fewest ones
  const int64_t rows = tiles::divide_up(sizes.rows, MAX_ROWS);
  const int64_t columns = tiles::divide_up(sizes.columns, MAX_COLUMNS);
  Parts best;
  double least = 0;
  for (int64_t i = rows; i <= rows + most; ++i) {
    if (i > rows && largest_of(i, sizes.rows, tile.rows) < MIN_ROWS) break;
    for (int64_t j = columns; j <= columns + most; ++j) {
      if (j > columns && largest_of(j, sizes.columns, tile.columns) < MIN_COLUMNS) break;
      const Parts parts{i, j};
      const double time = time_of(work, parts, threads);
      if (!best.rows || time < least) {
        best = parts;
        least = time;
      }
    }
  }
  return best;
}

void multiply([[maybe_unused]] const Work& work, [[maybe_unused]] int64_t task) {
#ifdef HAS_LOOPS
  const Block block = block_of(work, task);
  if (work.precision != Precision::FLOAT32) {
    const bfloat16::Multiplier& by = multiplier_of(work);
    const auto multiply_pairs = OF_INSTRUCTION_SET(work.instructions, multiply_pairs);
    return multiply_pairs(work, block, by, PairMemory(work, block, by.rows));
  }
  // The same thread usually takes the next task.
  const Block next = task + 1 < work.tasks() ? block_of(work, task + 1) : Block{};
  const Memory memory(work, block);
  float* panels = memory.buffer.data();
  float* frames = panels + memory.panels;
  const auto multiply_block = OF_INSTRUCTION_SET(work.instructions, multiply_block);
  multiply_block(work, block, next, panels, frames, frames + memory.frames);
#endif
}

const bfloat16::Multiplier* multiplier_for([[maybe_unused]] InstructionSet instructions) {
  if (const bfloat16::Multiplier* found = bfloat16::multiplier()) return found;
#ifdef HAS_LOOPS
  return &OF_INSTRUCTION_SET(instructions, MULTIPLIER);
#else
  return nullptr;
#endif
}

Factor::Factor(
    [[maybe_unused]] const float* b, int64_t steps, int64_t columns,
    InstructionSet instructions, const bfloat16::Multiplier* multiplier)
    : steps_(steps), columns_(columns), instructions_(instructions), multiplier_(multiplier) {
#ifdef HAS_LOOPS
  if (multiplier) {
    panels_ = Buffer(tiles::divide_up(columns, bfloat16::COLUMNS) * pair_panel(steps));
    const auto pack_pairs = OF_INSTRUCTION_SET(instructions, pack_factor);
    pack_pairs(b, steps, columns, panels_.data());
    return;
  }
  const int64_t width = tile_of(instructions).columns;
  panels_ = Buffer(tiles::divide_up(columns, width) * padded(steps * width));
  const auto pack = OF_INSTRUCTION_SET(instructions, pack_rows);
  pack(b, columns, steps, columns, panels_.data());
#endif
}

void Factor::multiply(
    [[maybe_unused]] Rows<const float> a, [[maybe_unused]] Rows<const float> addend,
    [[maybe_unused]] Rows<float> y, [[maybe_unused]] int64_t rows) const {
#ifdef HAS_LOOPS
  Target to{};
  to.y = y.data;
  to.pitch = y.pitch;
  to.alpha = 1.0f;
  to.addends = addend.data ? 1 : 0;
  to.addend[0] = addend.data;
  to.addend_pitch[0] = addend.pitch;
  to.is_first = to.is_last = true;
  if (multiplier_) {
    const auto multiply_pairs = OF_INSTRUCTION_SET(instructions_, multiply_rows_of_pairs);
    return multiply_pairs(*multiplier_, a.data, a.pitch, panels_.data(), steps_, to, rows, columns_);
  }
  const auto multiply_rows = OF_INSTRUCTION_SET(instructions_, multiply_rows);
  multiply_rows(a.data, a.pitch, panels_.data(), steps_, to, rows, columns_);
#endif
}

}  // namespace product

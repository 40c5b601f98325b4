#include "packed.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "tiles.h"
#include "vectorized.h"

namespace packed {

namespace {

using tiles::divide_up;
using tiles::round_up;

// The scales and zero points of a row of W.
class Blocks {
 public:
  Blocks(const Matrix& w, int64_t row)
      : scales(w.scales + row * w.blocks),
        float_zeros(w.float_zeros ? w.float_zeros + row * w.blocks : nullptr),
        zeros(w.zeros ? w.zeros + row * w.zero_bytes : nullptr),
        bits(int(w.bits)) {}

  float scale(int64_t block) const { return scales[block]; }
  float zero(int64_t block) const {
    if (float_zeros) return float_zeros[block];
    if (!zeros) return float(1 << (bits - 1));
    const int64_t position = block * bits;
    return float(zeros[position / 8] >> position % 8 & ((1 << bits) - 1));
  }

 private:
  const float *scales, *float_zeros;
  const uint8_t* zeros;
  int bits;
};

struct Functions {
  void (*unpack_row)(
      const Matrix& w, int64_t row, int64_t first, int64_t count, int64_t size, int64_t pitch,
      float* to);
  void (*unpack_rows)(
      const Matrix& w, int64_t row, int64_t rows, int64_t first, int64_t count, float* to);
  void (*add_products_of_few)(
      const float* numbers, int64_t n, const float* left, int64_t rows, int64_t pitch,
      float* sums);
  void (*add_multiples)(
      const float* numbers, int64_t n, const float* factors, int64_t rows, int64_t pitch,
      float* sums);
};

#define LOOPS "packed_loops.h"
#include "each_instruction_set.h"

const Functions& functions_for([[maybe_unused]] const Work& work) {
#ifdef HAS_LOOPS
  return OF_INSTRUCTION_SET(work.instructions, functions_of_bits)(work.matrix.bits);
#else
  static const Functions none{};
  return none;
#endif
}

// Numbers along the sum that are floats at one time.
constexpr int64_t STEPS = 256;
// Rows of a task. All of them use the same floats.
constexpr int64_t MAX_ROWS = 256;
// Columns of a task. All of them use the same copy of the rows.
constexpr int64_t MAX_COLUMNS = 256;
// With at most this number of rows, most of a tile would be empty.
constexpr int64_t FEW_ROWS = 4;

static_assert(MAX_COLUMNS <= STEPS, "run_few has one array for both");

// How the result is cut into tasks.
struct Tasks {
  int64_t rows, columns;  // of a task
  int64_t row_groups, column_groups;

  explicit Tasks(const Work& work) {
    const tiles::Functions& loops = tiles::functions_of(work.instructions);
    const int64_t width = loops.width_for(work.outer());
    rows = divide_up(work.rows, divide_up(work.rows, MAX_ROWS));
    columns = std::max(width, MAX_COLUMNS / width * width);
    row_groups = divide_up(work.rows, rows);
    column_groups = divide_up(work.outer(), columns);
  }
};

// Some rows and columns of the result.
class Part {
 public:
  Part(const Work& all, const Tasks& tasks, int64_t task)
      : work(all),
        functions(functions_for(all)),
        loops(tiles::functions_of(all.instructions)),
        inner(all.inner()),
        outer(all.outer()),
        first_row(task / tasks.column_groups * tasks.rows),
        first_column(task % tasks.column_groups * tasks.columns),
        rows(std::min(tasks.rows, all.rows - first_row)),
        columns(std::min(tasks.columns, outer - first_column)) {}

  void run() const { rows <= FEW_ROWS ? run_few() : run_tiles(); }

 private:
  const Work& work;
  const Functions& functions;
  const tiles::Functions& loops;
  const int64_t inner, outer, first_row, first_column, rows, columns;

  void run_tiles() const {
    const int64_t width = loops.width_for(outer), panels = divide_up(columns, width);
    std::vector<int64_t> offsets(static_cast<size_t>(rows));
    for (int64_t row = 0; row < rows; ++row) offsets[size_t(row)] = row * STEPS;
    loops.pad(offsets, width);
    std::vector<tiles::Step> steps;
    for (int64_t i = 0; i < STEPS; ++i) steps.push_back({i, i * width});
    const int64_t sums_of_panel = int64_t(offsets.size()) * width;
    const Buffer panel(panels * STEPS * width), sums(panels * sums_of_panel), left(rows * STEPS);
    for (int64_t first = 0; first < inner; first += STEPS) {
      const int64_t count = std::min(STEPS, inner - first);
      copy_left(first, count, left.data());
      unpack(first, count, width, panel.data());
      for (int64_t i = 0; i < panels; ++i) {
        loops.add_products(
            left.data(), offsets, steps.data(), count, panel.data() + i * STEPS * width, width,
            first == 0, sums.data() + i * sums_of_panel);
      }
    }
    for (int64_t i = 0; i < panels; ++i) {
      for (int64_t row = 0; row < rows; ++row) {
        write(row, i * width, width, sums.data() + i * sums_of_panel + row * width, 1);
      }
    }
  }

  // Rows that lie behind each other do not displace each other from the cache.
  void copy_left(int64_t first, int64_t count, float* to) const {
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = work.left + (first_row + row) * inner + first;
      std::copy_n(from, count, to + row * STEPS);
    }
  }

  // Write panels of `width` columns: panel[step][column].
  void unpack(int64_t first, int64_t count, int64_t width, float* panel) const {
    if (work.is_transposed) {
      for (int64_t i = 0; i < columns; i += width, panel += STEPS * width) {
        functions.unpack_rows(work.matrix, first_column + i, width, first, count, panel);
      }
      return;
    }
    const int64_t whole = round_up(columns, loops.lanes);
    for (int64_t step = 0; step < count; ++step, panel += width) {
      functions.unpack_row(
          work.matrix, first + step, first_column, whole, width, STEPS * width, panel);
    }
  }

  void run_few() const {
    const Buffer numbers(STEPS), sums(rows * MAX_COLUMNS);
    std::fill_n(sums.data(), rows * MAX_COLUMNS, 0.0f);
    const float* left = work.left + first_row * inner;
    if (work.is_transposed) {
      for (int64_t column = 0; column < columns; ++column) {
        for (int64_t first = 0; first < inner; first += STEPS) {
          const int64_t count = std::min(STEPS, inner - first);
          unpack_row(first_column + column, first, count, numbers.data());
          functions.add_products_of_few(
              numbers.data(), count, left + first, rows, inner, sums.data() + column * rows);
        }
      }
      for (int64_t row = 0; row < rows; ++row) write(row, 0, columns, sums.data() + row, rows);
      return;
    }
    const int64_t whole = round_up(columns, loops.lanes);
    for (int64_t i = 0; i < inner; ++i) {
      unpack_row(i, first_column, columns, numbers.data());
      functions.add_multiples(numbers.data(), whole, left + i, rows, inner, sums.data());
    }
    for (int64_t row = 0; row < rows; ++row) {
      write(row, 0, columns, sums.data() + row * whole, 1);
    }
  }

  // Write a piece of a row of W, up to the end of a vector.
  void unpack_row(int64_t row, int64_t first, int64_t count, float* to) const {
    const int64_t whole = round_up(count, loops.lanes);
    functions.unpack_row(work.matrix, row, first, whole, whole, whole, to);
  }

  // Write some columns of a row from sums that are `pitch` apart.
  void write(
      int64_t row, int64_t column, int64_t most, const float* sums, int64_t pitch) const {
    const int64_t count = std::min(most, columns - column), place = first_column + column;
    float* to = work.result + (first_row + row) * outer + place;
    if (pitch == 1) {
      std::copy_n(sums, count, to);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = sums[i * pitch];
    }
    if (work.bias) {
      for (int64_t i = 0; i < count; ++i) to[i] += work.bias[place + i];
    }
  }
};

}  // namespace

int64_t Work::tasks() const {
  if (!rows) return 0;
  const Tasks tasks(*this);
  return tasks.row_groups * tasks.column_groups;
}

void run(const Work& work, int64_t task) { Part(work, Tasks(work), task).run(); }

}  // namespace packed

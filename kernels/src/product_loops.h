// The loops of product.cpp. They are compiled once for each instruction set.

constexpr Tile SIZE = {REGISTERS == 32 ? 8 : 6, 2 * LANES};  // its sums fill the registers
constexpr int TILE = SIZE.rows;
constexpr int64_t WIDTH = SIZE.columns;
constexpr int MAX_VECTORS = WIDTH / LANES;  // of a row of a tile
constexpr int64_t FRAME_ROWS = frame_rows(SIZE);

// Return the columns of a panel, which are whole vectors.
inline int64_t width_of(int64_t columns) { return columns <= 0 ? 0 : columns > LANES ? WIDTH : LANES; }

// Let the processor load rows that are written or read soon.
template <bool ARE_WRITTEN>
ALWAYS_INLINE void prefetch_rows(const float* row, int64_t pitch, int64_t rows, int64_t columns) {
  for (; rows > 0; --rows, row += pitch) {
    for (int64_t i = 0; i < columns; i += IN_LINE) __builtin_prefetch(row + i, ARE_WRITTEN);
  }
}

// Rows that are copied later. While tiles are computed, the processor loads them into its cache, a few
// at a time.
struct Ahead {
  const float* row = nullptr;
  int64_t pitch = 0, rows = 0, lines = 0, at_a_time = 1;

  ALWAYS_INLINE void load_rows() {
    for (int64_t n = std::min(at_a_time, rows); n > 0; --n, --rows, row += pitch) {
      for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(row + i * IN_LINE, 0, 2);
    }
  }
};

// Return rows that are loaded at `loads` times.
Ahead ahead(const float* row, int64_t pitch, int64_t rows, int64_t columns, int64_t loads) {
  return {row, pitch, rows, tiles::divide_up(columns, IN_LINE), tiles::divide_up(rows, loads)};
}

// The next rows of both factors.
struct Next {
  Ahead a, b;

  ALWAYS_INLINE void load_rows() {
    a.load_rows();
    b.load_rows();
  }
};

// Add the products of a step: of the number of each row of a tile with a row of a panel.
template <int VECTORS, typename Number>
ALWAYS_INLINE void add_step(const Number& number_of, const float* panel, Vector (&sums)[TILE][VECTORS]) {
  Vector factors[VECTORS];
  for (int v = 0; v < VECTORS; ++v) factors[v] = load(panel + v * LANES);
  UNROLLED(8) for (int row = 0; row < TILE; ++row) {
    UNROLLED(2) for (int v = 0; v < VECTORS; ++v) sums[row][v] += factors[v] * number_of(row);
  }
}

// Add the products of the rows of a tile, which are `pitch` apart, with a panel.
template <int VECTORS>
inline void add_rows(
    const float* a, int64_t pitch, int64_t rows, const float* panel, int64_t steps, Next& next,
    Vector (&sums)[TILE][VECTORS]) {
  const float* of_row[TILE];
  for (int64_t i = 0; i < TILE; ++i) of_row[i] = a + std::min(i, rows - 1) * pitch;
  for (int64_t first = 0; first < steps; first += IN_LINE) {
    const int64_t end = std::min(first + IN_LINE, steps);
    next.load_rows();
    for (int64_t step = first; step < end; ++step, panel += VECTORS * LANES) {
      add_step<VECTORS>([&](int row) INLINE { return of_row[row][step]; }, panel, sums);
    }
  }
}

// The same for a frame, (steps, rows of the tile).
template <int VECTORS>
inline void add_frame(
    const float* frame, const float* panel, int64_t steps, Next& next,
    Vector (&sums)[TILE][VECTORS]) {
  for (int64_t first = 0; first < steps; first += IN_LINE) {
    const int64_t end = std::min(first + IN_LINE, steps);
    next.load_rows();
    for (int64_t step = first; step < end; ++step, frame += TILE, panel += VECTORS * LANES) {
      add_step<VECTORS>([&](int row) INLINE { return frame[row]; }, panel, sums);
    }
  }
}

// Call function(row, v, place of the vector in rows that are `pitch` apart) for each vector of a tile.
template <int VECTORS, typename Function>
ALWAYS_INLINE void for_each_vector(int64_t pitch, const Function& function) {
  UNROLLED(8) for (int row = 0; row < TILE; ++row) {
    UNROLLED(2) for (int v = 0; v < VECTORS; ++v) function(row, v, row * pitch + v * LANES);
  }
}

// Finish the sums of a tile and write them to their target, all of whose rows and columns are there.
template <int VECTORS>
ALWAYS_INLINE void write_tile(Vector (&sums)[TILE][VECTORS], const Target& to) {
  const auto each = [](int64_t pitch, const auto& function) INLINE {
    for_each_vector<VECTORS>(pitch, function);
  };
  if (to.alpha != 1.0f) {
    each(0, [&](int row, int v, int64_t) INLINE { sums[row][v] *= to.alpha; });
  }
  for (size_t i = 0; i < to.addends; ++i) {
    const float* addend = to.addend[i];
    each(to.addend_pitch[i], [&](int row, int v, int64_t place) INLINE {
      sums[row][v] += load(addend + place);
    });
  }
  if (to.has_relu) {  // NaN stays NaN
    each(0, [&](int row, int v, int64_t) INLINE {
      sums[row][v] = sums[row][v] < 0.0f ? Vector{} : sums[row][v];
    });
  }
  float* y = to.y;
  each(to.pitch, [&](int row, int v, int64_t place) INLINE { store(y + place, sums[row][v]); });
}

// Copy some of the numbers of a tile.
inline void copy_part(
    const float* from, int64_t from_pitch, float* to, int64_t to_pitch, int64_t rows,
    int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * to_pitch, from + row * from_pitch, size_t(columns) * sizeof(float));
  }
}

// The same for a target that has only the first rows and columns: the addends are copied to whole tiles,
// and the result is copied back.
template <int VECTORS>
ALWAYS_INLINE void write_part(
    Vector (&sums)[TILE][VECTORS], const Target& to, int64_t rows, int64_t columns) {
  constexpr int64_t width = VECTORS * LANES;
  float y[TILE * width], addends[MAX_ADDENDS][TILE * width] = {};
  Target whole = to;
  whole.y = y;
  whole.pitch = width;
  for (size_t i = 0; i < to.addends; ++i) {
    copy_part(to.addend[i], to.addend_pitch[i], addends[i], width, rows, columns);
    whole.addend[i] = addends[i];
    whole.addend_pitch[i] = width;
  }
  write_tile(sums, whole);
  copy_part(y, width, to.y, to.pitch, rows, columns);
}

// Compute a tile, of which some rows and columns are there. `left` are its rows if they have a pitch,
// else its frame.
template <int VECTORS>
void multiply_tile(
    const float* left, int64_t pitch, const float* panel, int64_t steps, const Target& to,
    int64_t rows, int64_t columns, Next& next) {
  rows = std::min<int64_t>(rows, TILE);
  columns = std::min<int64_t>(columns, VECTORS * LANES);
  if (to.is_last) {
    prefetch_rows<true>(to.y, to.pitch, rows, columns);
    for (size_t i = 0; i < to.addends; ++i) {
      prefetch_rows<false>(to.addend[i], to.addend_pitch[i], rows, columns);
    }
  }
  Vector sums[TILE][VECTORS] = {};
  if (pitch) add_rows(left, pitch, rows, panel, steps, next, sums);
  else add_frame(left, panel, steps, next, sums);
  float* partial = to.partial;
  if (!to.is_first) {
    for_each_vector<VECTORS>(to.partial_pitch, [&](int row, int v, int64_t place) INLINE {
      sums[row][v] += load(partial + place);
    });
  }
  if (!to.is_last) {
    for_each_vector<VECTORS>(to.partial_pitch, [&](int row, int v, int64_t place) INLINE {
      store(partial + place, sums[row][v]);
    });
  } else if (rows == TILE && columns == VECTORS * LANES) {
    write_tile(sums, to);
  } else {
    write_part(sums, to, rows, columns);
  }
}

// Write panel[step][column] = b[step row distance + column] for all panels of a block, and 0 in columns
// that are not there.
void pack_rows(const float* b, int64_t pitch, int64_t steps, int64_t columns, float* panels) {
  const int64_t distance = padded(steps * WIDTH);
  const int64_t whole = columns / WIDTH, left = columns % WIDTH, width = width_of(left);
  for (int64_t step = 0; step < steps; ++step, b += pitch) {
    for (int64_t i = 0; i < columns; i += IN_LINE) __builtin_prefetch(b + 4 * pitch + i);
    float* panel = panels + step * WIDTH;
    const float* from = b;
    for (int64_t i = 0; i < whole; ++i, panel += distance, from += WIDTH) {
      for (int v = 0; v < WIDTH; v += LANES) store(panel + v, load(from + v));
    }
    float* last = panels + whole * distance + step * width;
    int64_t i = 0;
    for (; i + LANES <= left; i += LANES) store(last + i, load(from + i));
    for (; i < left; ++i) last[i] = from[i];
    for (; i < width; ++i) last[i] = 0.0f;
  }
}

// Write a transposed block of LANES steps of some columns, whose steps are adjacent.
inline void pack_block(const float* b, int64_t pitch, int64_t columns, int64_t width, float* panel) {
  Vector block[LANES];
  if (columns >= LANES) {
    UNROLLED(16) for (int64_t i = 0; i < LANES; ++i) block[i] = load(b + i * pitch);
  } else {
    for (int64_t i = 0; i < LANES; ++i) block[i] = i < columns ? load(b + i * pitch) : Vector{};
  }
  transpose(block);
  UNROLLED(16) for (int64_t i = 0; i < LANES; ++i) store(panel + i * width, block[i]);
}

// The same for one panel, and for columns that are not adjacent.
void pack_columns(const float* b, const View& view, int64_t steps, int64_t columns, float* panel) {
  const int64_t width = width_of(columns);
  for (int64_t first = 0; first < width; first += LANES) {
    const int64_t there = columns - first;
    const float* from = b + first * view.column;
    int64_t step = 0;
    for (; view.row == 1 && step + LANES <= steps; step += LANES) {
      pack_block(from + step, view.column, there, width, panel + step * width + first);
    }
    for (; step < steps; ++step) {
      float* to = panel + step * width + first;
      for (int64_t i = 0; i < LANES; ++i) {
        to[i] = i < there ? from[step * view.row + i * view.column] : 0.0f;
      }
    }
  }
}

// Write frame[tile][step][row of the tile] for all rows of a block, whose steps are not adjacent. The
// last row is repeated to fill its tile.
void pack_frames(const float* a, const View& view, int64_t rows, int64_t steps, float* frames) {
  const int64_t distance = padded(steps * TILE);
  for (int64_t step = 0; step < steps; ++step, a += view.column, frames += TILE) {
    for (int64_t i = 0; i < rows; i += IN_LINE) __builtin_prefetch(a + 4 * view.column + i * view.row);
    float* frame = frames;
    for (int64_t row = 0; row < rows; row += TILE, frame += distance) {
      if (view.row == 1 && rows - row >= TILE) {
        std::memcpy(frame, a + row, TILE * sizeof(float));
      } else {
        for (int64_t i = 0; i < TILE; ++i) frame[i] = a[std::min(row + i, rows - 1) * view.row];
      }
    }
  }
}

// Return the rows of b, or of its transpose, that a block copies from a step on. `loads` are the times
// at which they can be loaded.
Ahead rows_of_b(const Work& work, const Block& block, int64_t step, int64_t loads) {
  if (!block.b) return {};
  const View& b = work.b.view;
  const int64_t steps = std::min(STEPS, work.sizes.steps - step);
  const float* first = block.b + step * b.row;
  if (b.column == 1) return ahead(first, b.row, steps, block.columns, loads);
  if (b.row == 1) return ahead(first, b.column, block.columns, steps, loads);
  return {};
}

// The same for the rows of the transpose of a that a block copies to frames, from a row on.
Ahead frames_of_a(const Work& work, const Block& block, int64_t row, int64_t step, int64_t loads) {
  const View& a = work.a.view;
  if (!block.a || a.row != 1) return {};
  const int64_t steps = std::min(STEPS, work.sizes.steps - step);
  const float* first = block.a + row + step * a.column;
  return ahead(first, a.column, steps, std::min(FRAME_ROWS, block.rows - row), loads);
}

// The same for the rows of a that a block reads where they are.
Ahead rows_of_a(const Work& work, const Block& block, int64_t loads) {
  if (!block.a) return {};
  return ahead(block.a, work.a.view.row, block.rows, std::min(STEPS, work.sizes.steps), loads);
}

// Multiply rows, which are frames if they have no pitch, with panels. A tile of rows is multiplied with
// one panel after the other: it stays in the nearest cache, and the rows of the result are written from
// their first to their last column.
void multiply_panels(
    const float* left, int64_t pitch, const float* panels, int64_t steps, const Target& to,
    int64_t rows, int64_t columns, Next& next) {
  for (int64_t row = 0; row < rows; row += TILE) {
    const float* of_tile = left + (pitch ? row * pitch : row / TILE * padded(steps * TILE));
    for (int64_t column = 0; column < columns; column += WIDTH) {
      const auto multiply = columns - column > LANES ? multiply_tile<MAX_VECTORS> : multiply_tile<1>;
      const float* panel = panels + column / WIDTH * padded(steps * WIDTH);
      multiply(of_tile, pitch, panel, steps, to.at(row, column), rows - row, columns - column, next);
    }
  }
}

void multiply_rows(
    const float* a, int64_t pitch, const float* panels, int64_t steps, const Target& to,
    int64_t rows, int64_t columns) {
  Next nothing;
  multiply_panels(a, pitch, panels, steps, to, rows, columns, nothing);
}

// Return how often the tiles of a block load rows.
int64_t loads_of(int64_t rows, int64_t columns, int64_t steps) {
  return tiles::divide_up(rows, TILE) * tiles::divide_up(columns, WIDTH) * tiles::divide_up(steps, IN_LINE);
}

// Copy some rows after the other to frames, and multiply them while the next ones are loaded.
void multiply_frames(
    const Work& work, const Block& block, const Block& next_block, const float* panels,
    float* frames, int64_t step, const Target& to, Next& next) {
  const View& a = work.a.view;
  const int64_t steps = std::min(STEPS, work.sizes.steps - step);
  for (int64_t row = 0; row < block.rows; row += FRAME_ROWS) {
    const int64_t rows = std::min(FRAME_ROWS, block.rows - row);
    pack_frames(block.a + row * a.row + step * a.column, a, rows, steps, frames);
    const int64_t loads = loads_of(rows, block.columns, steps);
    if (row + rows < block.rows) next.a = frames_of_a(work, block, row + rows, step, loads);
    else if (!to.is_last) next.a = frames_of_a(work, block, 0, step + steps, loads);
    else next.a = frames_of_a(work, next_block, 0, 0, loads);
    multiply_panels(frames, 0, panels, steps, to.at(row, 0), rows, block.columns, next);
  }
}

void multiply_block(
    const Work& work, const Block& block, const Block& next_block, float* panels, float* frames,
    float* partial) {
  const View &a = work.a.view, &b = work.b.view;
  Target to = target_of(work, block);
  to.partial = partial;
  to.partial_pitch = tiles::round_up(block.columns, LANES);
  for (int64_t step = 0; step < work.sizes.steps; step += STEPS) {
    const int64_t steps = std::min(STEPS, work.sizes.steps - step);
    to.is_first = step == 0;
    to.is_last = step + steps == work.sizes.steps;
    const float* right = block.b + step * b.row;
    if (b.column == 1) {
      pack_rows(right, b.row, steps, block.columns, panels);
    } else {
      for (int64_t column = 0; column < block.columns; column += WIDTH) {
        const int64_t columns = std::min(block.columns - column, WIDTH);
        pack_columns(right + column * b.column, b, steps, columns, panels + column / WIDTH * padded(steps * WIDTH));
      }
    }
    const int64_t loads = loads_of(block.rows, block.columns, steps);
    Next next;
    next.b = to.is_last ? rows_of_b(work, next_block, 0, loads) : rows_of_b(work, block, step + steps, loads);
    if (!work.reads_rows()) {
      multiply_frames(work, block, next_block, panels, frames, step, to, next);
      continue;
    }
    if (to.is_last && next_block.a != block.a) next.a = rows_of_a(work, next_block, loads);
    const float* left = block.a + step * a.column;
    multiply_panels(left, a.row, panels, steps, to, block.rows, block.columns, next);
  }
}

#include "bfloat16_loops.h"

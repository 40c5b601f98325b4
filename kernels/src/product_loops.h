// The loops of product.cpp. They are compiled once for each instruction set.

constexpr Tile SIZE = LANES == 16 ? AVX512_TILE : AVX2_TILE;
constexpr int TILE = SIZE.rows;
constexpr int64_t WIDTH = SIZE.columns;
constexpr int MAX_VECTORS = WIDTH / LANES;  // of a row of a tile

// Return the columns of a panel, which are whole vectors.
inline int64_t width_of(int64_t columns) { return columns <= 0 ? 0 : columns > LANES ? WIDTH : LANES; }

// Let the processor load rows that are written or read soon.
template <bool ARE_WRITTEN>
ALWAYS_INLINE void prefetch_rows(const float* row, int64_t pitch, int64_t rows, int64_t columns) {
  for (; rows > 0; --rows, row += pitch) {
    for (int64_t i = 0; i < columns; i += IN_LINE) __builtin_prefetch(row + i, ARE_WRITTEN);
  }
}

// Rows that are copied after this block. While its tiles are computed, the processor loads these rows
// into its cache, one after the other.
struct Ahead {
  const float* row = nullptr;
  int64_t pitch = 0, rows = 0, lines = 0;

  ALWAYS_INLINE void load_row() {
    if (rows == 0) return;
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(row + i * IN_LINE, 0, 2);
    row += pitch;
    --rows;
  }
};

// Add the products of a step: of the number of each row of a tile with a row of a panel.
template <int VECTORS, typename Number>
ALWAYS_INLINE void add_step(const Number& number_of, const float* panel, Vector (&sums)[TILE][VECTORS]) {
  Vector factors[VECTORS];
  for (int v = 0; v < VECTORS; ++v) factors[v] = load(panel + v * LANES);
#pragma GCC unroll 8
  for (int row = 0; row < TILE; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) sums[row][v] += factors[v] * number_of(row);
  }
}

// Add the products of the rows of a tile, which are `pitch` apart, with a panel.
template <int VECTORS>
inline void add_rows(
    const float* a, int64_t pitch, int64_t rows, const float* panel, int64_t steps, Ahead& ahead,
    Vector (&sums)[TILE][VECTORS]) {
  const float* of_row[TILE];
  for (int64_t i = 0; i < TILE; ++i) of_row[i] = a + std::min(i, rows - 1) * pitch;
  for (int64_t first = 0; first < steps; first += IN_LINE) {
    const int64_t end = std::min(first + IN_LINE, steps);
    ahead.load_row();
    for (int64_t step = first; step < end; ++step, panel += VECTORS * LANES) {
      add_step<VECTORS>([&](int row) INLINE { return of_row[row][step]; }, panel, sums);
    }
  }
}

// The same for a frame, (steps, rows of the tile).
template <int VECTORS>
inline void add_frame(
    const float* frame, const float* panel, int64_t steps, Ahead& ahead,
    Vector (&sums)[TILE][VECTORS]) {
  for (int64_t first = 0; first < steps; first += IN_LINE) {
    const int64_t end = std::min(first + IN_LINE, steps);
    ahead.load_row();
    for (int64_t step = first; step < end; ++step, frame += TILE, panel += VECTORS * LANES) {
      add_step<VECTORS>([&](int row) INLINE { return frame[row]; }, panel, sums);
    }
  }
}

// Compute a tile, of which some rows and columns are there. `left` are its rows if they have a pitch,
// else its frame.
template <int VECTORS>
void multiply_tile(
    const float* left, int64_t pitch, const float* panel, int64_t steps, const Target& to,
    int64_t rows, int64_t columns, Ahead& ahead) {
  rows = std::min<int64_t>(rows, TILE);
  columns = std::min<int64_t>(columns, VECTORS * LANES);
  if (to.is_last) {
    prefetch_rows<true>(to.y, to.pitch, rows, columns);
    for (size_t i = 0; i < to.addends; ++i) {
      prefetch_rows<false>(to.addend[i], to.addend_pitch[i], rows, columns);
    }
  }
  Vector sums[TILE][VECTORS] = {};
  if (pitch) add_rows(left, pitch, rows, panel, steps, ahead, sums);
  else add_frame(left, panel, steps, ahead, sums);
#pragma GCC unroll 8
  for (int row = 0; row < TILE; ++row) {
    if (row >= rows) break;
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      Vector sum = sums[row][v];
      const int64_t there = std::min<int64_t>(columns - v * LANES, LANES);
      if (there <= 0) break;
      if (!to.is_first) sum += load(to.partial + row * to.partial_pitch + v * LANES);
      if (!to.is_last) {
        store(to.partial + row * to.partial_pitch + v * LANES, sum);
        continue;
      }
      sum *= to.alpha;
      for (size_t i = 0; i < to.addends; ++i) {
        const float* from = to.addend[i] + row * to.addend_pitch[i] + v * LANES;
        Vector addend = {};
        if (there == LANES) addend = load(from);
        else std::memcpy(&addend, from, size_t(there) * sizeof(float));
        sum += addend;
      }
      if (to.has_relu) sum = sum < 0.0f ? Vector{} : sum;  // NaN stays NaN
      float* y = to.y + row * to.pitch + v * LANES;
      if (there == LANES) store(y, sum);
      else std::memcpy(y, &sum, size_t(there) * sizeof(float));
    }
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
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; ++i) block[i] = load(b + i * pitch);
  } else {
    for (int64_t i = 0; i < LANES; ++i) block[i] = i < columns ? load(b + i * pitch) : Vector{};
  }
  transpose(block);
#pragma GCC unroll 16
  for (int64_t i = 0; i < LANES; ++i) store(panel + i * width, block[i]);
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

// Return the rows of b, or of its transpose, that a block copies from a step on.
Ahead rows_ahead(const Work& work, const Block& block, int64_t step) {
  if (!block.b) return {};
  const View& b = work.b.view;
  const int64_t steps = std::min(STEPS, work.sizes.steps - step);
  const float* first = block.b + step * b.row;
  if (b.column == 1) return {first, b.row, steps, tiles::divide_up(block.columns, IN_LINE)};
  if (b.row == 1) return {first, b.column, block.columns, tiles::divide_up(steps, IN_LINE)};
  return {};
}

// Multiply rows, which are frames if they have no pitch, with panels. A tile of rows is multiplied with
// one panel after the other: it stays in the nearest cache, and the rows of the result are written from
// their first to their last column.
void multiply_panels(
    const float* left, int64_t pitch, const float* panels, int64_t steps, const Target& to,
    int64_t rows, int64_t columns, Ahead ahead) {
  for (int64_t row = 0; row < rows; row += TILE) {
    const float* of_tile = left + (pitch ? row * pitch : row / TILE * padded(steps * TILE));
    for (int64_t column = 0; column < columns; column += WIDTH) {
      const auto multiply = columns - column > LANES ? multiply_tile<MAX_VECTORS> : multiply_tile<1>;
      const float* panel = panels + column / WIDTH * padded(steps * WIDTH);
      multiply(
          of_tile, pitch, panel, steps, to.at(row, column), rows - row, columns - column, ahead);
    }
  }
}

void multiply_rows(
    const float* a, int64_t pitch, const float* panels, int64_t steps, const Target& to,
    int64_t rows, int64_t columns) {
  multiply_panels(a, pitch, panels, steps, to, rows, columns, {});
}

void multiply_block(
    const Work& work, const Block& block, const Block& next, float* panels, float* frames, float* partial) {
  const View &a = work.a.view, &b = work.b.view;
  const bool has_rows = work.reads_rows();
  Target to{};
  to.y = block.y;
  to.pitch = work.y.view.row;
  to.alpha = work.alpha;
  to.has_relu = work.has_relu;
  to.addends = work.addends;
  to.partial = partial;
  to.partial_pitch = tiles::round_up(block.columns, LANES);
  for (size_t i = 0; i < work.addends; ++i) {
    to.addend[i] = block.addend[i];
    to.addend_pitch[i] = work.addend[i].view.row;
  }
  for (int64_t step = 0; step < work.sizes.steps; step += STEPS) {
    const int64_t steps = std::min(STEPS, work.sizes.steps - step);
    to.is_first = step == 0;
    to.is_last = step + steps == work.sizes.steps;
    const float *left = block.a + step * a.column, *right = block.b + step * b.row;
    if (b.column == 1) {
      pack_rows(right, b.row, steps, block.columns, panels);
    } else {
      for (int64_t column = 0; column < block.columns; column += WIDTH) {
        const int64_t columns = std::min(block.columns - column, WIDTH);
        pack_columns(right + column * b.column, b, steps, columns, panels + column / WIDTH * padded(steps * WIDTH));
      }
    }
    if (!has_rows) pack_frames(left, a, block.rows, steps, frames);
    const Ahead ahead = to.is_last ? rows_ahead(work, next, 0) : rows_ahead(work, block, step + steps);
    multiply_panels(
        has_rows ? left : frames, has_rows ? a.row : 0, panels, steps, to, block.rows,
        block.columns, ahead);
  }
}

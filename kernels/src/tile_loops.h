// The innermost loops of tiles.cpp. They are compiled once for each instruction set.

constexpr int MAX_VECTORS = REGISTERS == 32 ? 4 : 2;  // of a row of a tile

// The rows of a tile: with a vector for each row of a step, it fills the registers.
constexpr int rows_of_tile(int vectors) { return REGISTERS == 32 && vectors < 4 ? 8 : 6; }

// Add to a tile of sums, which is (rows, columns) in memory. If `are_first`, the products replace them.
template <int VECTORS>
void add_tile(
    const float* frame, const int64_t* rows, const Step* steps, int64_t count, const float* panel,
    bool are_first, float* sums) {
  constexpr int ROWS = rows_of_tile(VECTORS);
  Vector tile[ROWS][VECTORS] = {};
  const float* of_row[ROWS];
  for (int row = 0; row < ROWS; ++row) of_row[row] = frame + rows[row];
  for (int64_t step = 0; step < count; ++step) {
    const auto [offset, place] = steps[step];
    Vector factors[VECTORS];
    for (int i = 0; i < VECTORS; ++i) factors[i] = load(panel + place + i * LANES);
    UNROLLED(8) for (int row = 0; row < ROWS; ++row) {
      UNROLLED(4) for (int i = 0; i < VECTORS; ++i) tile[row][i] += factors[i] * of_row[row][offset];
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    for (int i = 0; i < VECTORS; ++i, sums += LANES) {
      store(sums, are_first ? tile[row][i] : load(sums) + tile[row][i]);
    }
  }
}

// Write panel[step][column] = from[numbers[step] + column pitch], and 0 in columns that are not
// there. The array ends at `end`.
void pack(
    const float* from, const float* end, const int64_t* numbers, int64_t count, int64_t pitch,
    int64_t columns, int64_t width, float* panel) {
  for (int64_t first = 0; first < width; first += LANES) {
    const int64_t there = std::min<int64_t>(std::max<int64_t>(columns - first, 0), LANES);
    for (int64_t step = 0; step < count;) {
      int64_t run = 1;  // of numbers that lie behind each other
      while (run < LANES && step + run < count && numbers[step + run] == numbers[step] + run) ++run;
      const float* begin = from + numbers[step] + first * pitch;
      Vector block[LANES] = {};
      for (int64_t column = 0; column < there; ++column) {
        const float* read = begin + column * pitch;
        if (end - read >= LANES) {
          block[column] = load(read);
        } else {
          std::memcpy(&block[column], read, size_t(run) * sizeof(float));
        }
      }
      transpose(block);
      float* to = panel + step * width + first;
      for (int64_t i = 0; i < run; ++i, to += width) store(to, block[i]);
      step += run;
    }
  }
}

// Write to[places[row] + column pitch] = sums[row][column] + bias[column]. LANES rows of the sums can
// be read behind each row.
void unpack(
    const float* sums, const int64_t* places, int64_t rows, const float* bias, int64_t columns,
    int64_t width, int64_t pitch, float* to) {
  for (int64_t first = 0; first < columns; first += LANES) {
    const int64_t there = std::min<int64_t>(columns - first, LANES);
    for (int64_t row = 0; row < rows; row += LANES) {
      const int64_t count = std::min<int64_t>(rows - row, LANES);
      const bool is_run = places[row + count - 1] == places[row] + count - 1;
      Vector block[LANES];
      for (int i = 0; i < LANES; ++i) block[i] = load(sums + (row + i) * width + first);
      transpose(block);
      for (int64_t column = 0; column < there; ++column) {
        const Vector sum = block[column] + (bias ? bias[first + column] : 0.0f);
        float* write = to + (first + column) * pitch;
        if (is_run && count == LANES) {
          store(write + places[row], sum);
        } else if (is_run) {
          std::memcpy(write + places[row], &sum, size_t(count) * sizeof(float));
        } else {
          for (int64_t i = 0; i < count; ++i) write[places[row + i]] = sum[i];
        }
      }
    }
  }
}

template <int VECTORS>
void add_tiles(
    const float* frame, const std::vector<int64_t>& rows, const Step* steps, int64_t count,
    const float* panel, bool are_first, float* sums) {
  constexpr int ROWS = rows_of_tile(VECTORS);
  for (size_t row = 0; row < rows.size(); row += ROWS, sums += ROWS * VECTORS * LANES) {
    add_tile<VECTORS>(frame, rows.data() + row, steps, count, panel, are_first, sums);
  }
}

void add_products(
    const float* frame, const std::vector<int64_t>& rows, const Step* steps, int64_t count,
    const float* panel, int64_t width, bool are_first, float* sums) {
  switch (width / LANES) {
    case 1: return add_tiles<1>(frame, rows, steps, count, panel, are_first, sums);
    case 2: return add_tiles<2>(frame, rows, steps, count, panel, are_first, sums);
#if REGISTERS == 32
    case 3: return add_tiles<3>(frame, rows, steps, count, panel, are_first, sums);
    case 4: return add_tiles<4>(frame, rows, steps, count, panel, are_first, sums);
#endif
  }
}

constexpr Functions FUNCTIONS{LANES, MAX_VECTORS, rows_of_tile, pack, add_products, unpack};

// The loops of low_rank.cpp. They are compiled once for each instruction set.

constexpr int MAX_VECTORS = 3;  // of a row of a tile: with RANKS rows, it fills the registers
constexpr int MAX_ROWS = 3;     // of dot products at a time, for the same reason

// Return the sum of the numbers of two vectors at some places, and those DISTANCE behind them.
template <int DISTANCE, typename Place>
inline Vector interleaved_sum(Vector a, Vector b, Place place) {
  return shuffle(a, b, place) + shuffle(a, b, [place](int i) { return place(i) + DISTANCE; });
}

// Write the scaled totals of RANKS vectors.
inline void write_totals(const Vector* vectors, float scale, float* to) {
  const auto even = [](int i) { return i % 2 * LANES + i / 2 * 2; };
  const auto low = [](int i) { return i / 2 % 2 * LANES + i / 4 * 4 + i % 2; };
  const Vector a = interleaved_sum<1>(vectors[0], vectors[1], even);
  const Vector b = interleaved_sum<1>(vectors[2], vectors[3], even);
  float sums[LANES];
  store(sums, interleaved_sum<2>(a, b, low));
  for (int i = RANKS; i < LANES; ++i) sums[i % RANKS] += sums[i];
  for (int i = 0; i < RANKS; ++i) to[i] = scale * sums[i];
}

// Write the products of rows with RANKS rows of the matrix.
template <int ROWS>
void multiply_rows(const float* rows, const Factor& factor, const float* matrix, float scale,
                   float* to, int64_t pitch) {
  const int64_t columns = factor.columns;
  Vector sums[ROWS][RANKS] = {};
  for (int64_t i = 0; i < columns; i += LANES) {
    Vector x[ROWS];
    for (int row = 0; row < ROWS; ++row) {
      const float* from = rows + row * columns + i;
      x[row] = load(from);
      // The rows of the next tile, which the processor would not load by itself in time.
      __builtin_prefetch(from + ROWS * columns);
    }
    UNROLLED(4) for (int k = 0; k < RANKS; ++k) {
      const Vector number = load(matrix + k * columns + i);
      UNROLLED(4) for (int row = 0; row < ROWS; ++row) sums[row][k] += x[row] * number;
    }
  }
  for (int row = 0; row < ROWS; ++row) write_totals(sums[row], scale, to + row * pitch);
}

// Write the products of rows with the whole matrix, (count, rank).
void multiply(
    const float* rows, int64_t count, const Factor& factor, int64_t rank, float scale, float* to) {
  for (int64_t row = 0; row < count;) {
    const bool is_tile = row + MAX_ROWS <= count;
    const auto multiply_tile = is_tile ? multiply_rows<MAX_ROWS> : multiply_rows<1>;
    for (int64_t k = 0; k < rank; k += RANKS) {
      multiply_tile(rows + row * factor.columns, factor, factor.matrix + k * factor.columns, scale,
                    to + row * rank + k, rank);
    }
    row += is_tile ? MAX_ROWS : 1;
  }
}

// Add the product of a few columns of u', (rank, count), with a few columns of the rows.
template <int VECTORS>
void add_tile(const float* u, int64_t rank, const float* rows, int64_t count, int64_t columns,
              float* sums) {
  Vector tile[RANKS][VECTORS] = {};
  for (int64_t row = 0; row < count; ++row, u += rank, rows += columns) {
    Vector x[VECTORS];
    for (int i = 0; i < VECTORS; ++i) x[i] = load(rows + i * LANES);
    UNROLLED(4) for (int k = 0; k < RANKS; ++k) {
      UNROLLED(4) for (int i = 0; i < VECTORS; ++i) tile[k][i] += x[i] * u[k];
    }
  }
  for (int k = 0; k < RANKS; ++k) {
    for (int i = 0; i < VECTORS; ++i) {
      float* sum = sums + k * columns + i * LANES;
      store(sum, load(sum) + tile[k][i]);
    }
  }
}

// Add the product of u', (rank, count), with rows.
void add_product(const float* u, int64_t rank, const float* rows, int64_t count, int64_t columns,
                 float* sums) {
  for (int64_t i = 0; i < columns;) {
    const int64_t vectors = std::min<int64_t>((columns - i) / LANES, MAX_VECTORS);
    const auto add = vectors == 3 ? add_tile<3> : vectors == 2 ? add_tile<2> : add_tile<1>;
    for (int64_t k = 0; k < rank; k += RANKS) {
      add(u + k, rank, rows + i, count, columns, sums + k * columns + i);
    }
    i += vectors * LANES;
  }
}

// Add the products of a block of rows to the sums of a task.
void add_block(const Gradient& work, int64_t row, int64_t count, float* sums) {
  alignas(64) float products[2][BLOCK * MAX_RANK];
  const int64_t rank = work.padded_rank();
  const float* rows[2];
  for (int i = 0; i < 2; ++i) {
    const Factor& factor = work.factors[size_t(i)];
    rows[i] = factor.rows + row * factor.columns;
    multiply(rows[i], count, factor, rank, work.scale, products[i]);
  }
  for (int i = 0; i < 2; ++i) {
    const int64_t columns = work.factors[size_t(i)].columns;
    add_product(products[1 - i], rank, rows[i], count, columns, sums);
    sums += rank * columns;
  }
}

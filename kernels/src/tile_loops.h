// The innermost loops of tiles.cpp. They are compiled once for each instruction set.

#include "pair_loops.h"

constexpr int MAX_VECTORS = REGISTERS == 32 ? 4 : 2;  // of a row of a tile

// The rows of a tile: with a vector for each row of a step, it fills the registers.
constexpr int rows_of_tile(int vectors) { return REGISTERS == 32 && vectors < 4 ? 8 : 6; }

// The numbers of frames and panels, and how their products are added.
struct Floats {
  static ALWAYS_INLINE Vector add(Vector sums, Vector factors, float number) { return sums + factors * number; }
};

struct Pairs {
  static ALWAYS_INLINE Vector add(Vector sums, Vector factors, float pair) {
#ifdef MULTIPLIES_PAIRS
    return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)factors, (__m512bh)_mm512_set1_ps(pair));
#else
    uint32_t bits;
    std::memcpy(&bits, &pair, sizeof bits);
    const Bits pairs = Bits{} + bits;
    sums += lower((Bits)factors) * lower(pairs);
    return sums + upper((Bits)factors) * upper(pairs);
#endif
  }
};

// Add to a tile of sums, which is (rows, columns) in memory. If `are_first`, the products replace them.
template <typename Numbers, int VECTORS>
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
      UNROLLED(4) for (int i = 0; i < VECTORS; ++i) {
        tile[row][i] = Numbers::add(tile[row][i], factors[i], of_row[row][offset]);
      }
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
  if (pitch == 1) {
    for (int64_t step = 0; step < count; ++step, panel += width) {
      std::memcpy(panel, from + numbers[step], size_t(columns) * sizeof(float));
      std::fill(panel + columns, panel + width, 0.0f);
    }
    return;
  }
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

// Write the pairs of the numbers of two arrays of rows, SIZE at a time. Without a second one, its numbers
// are 0. The last pairs of a row are written twice unless SIZE divides n.
template <int64_t SIZE>
void pair_rows_by(
    const float* first, const float* second, int64_t from_pitch, float* to, int64_t to_pitch,
    int64_t rows, int64_t n) {
  for (; rows > 0; --rows, first += from_pitch, to += to_pitch) {
    const auto write = [&](int64_t i) INLINE {
      Vector a{}, b{};
      std::memcpy(&a, first + i, SIZE * sizeof(float));
      if (second) std::memcpy(&b, second + i, SIZE * sizeof(float));
      const Vector pairs = pairs_of(a, b);
      std::memcpy(to + i, &pairs, SIZE * sizeof(float));
    };
    for (int64_t i = 0; i + SIZE <= n; i += SIZE) write(i);
    if (n % SIZE) write(n - SIZE);
    if (second) second += from_pitch;
  }
}

// The pairs may replace the numbers if whole vectors divide n.
void pair_rows(
    const float* first, const float* second, int64_t from_pitch, float* to, int64_t to_pitch,
    int64_t rows, int64_t n) {
  if (n >= LANES) return pair_rows_by<LANES>(first, second, from_pitch, to, to_pitch, rows, n);
  if (n >= LANES / 2) return pair_rows_by<LANES / 2>(first, second, from_pitch, to, to_pitch, rows, n);
  if (n >= LANES / 4) return pair_rows_by<LANES / 4>(first, second, from_pitch, to, to_pitch, rows, n);
  pair_rows_by<1>(first, second, from_pitch, to, to_pitch, rows, n);
}

template <typename Numbers, int VECTORS>
void add_tiles(
    const float* frame, const std::vector<int64_t>& rows, const Step* steps, int64_t count,
    const float* panel, bool are_first, float* sums) {
  constexpr int ROWS = rows_of_tile(VECTORS);
  for (size_t row = 0; row < rows.size(); row += ROWS, sums += ROWS * VECTORS * LANES) {
    add_tile<Numbers, VECTORS>(frame, rows.data() + row, steps, count, panel, are_first, sums);
  }
}

template <typename Numbers>
void add_products(
    const float* frame, const std::vector<int64_t>& rows, const Step* steps, int64_t count,
    const float* panel, int64_t width, bool are_first, float* sums) {
  switch (width / LANES) {
    case 1: return add_tiles<Numbers, 1>(frame, rows, steps, count, panel, are_first, sums);
    case 2: return add_tiles<Numbers, 2>(frame, rows, steps, count, panel, are_first, sums);
#if REGISTERS == 32
    case 3: return add_tiles<Numbers, 3>(frame, rows, steps, count, panel, are_first, sums);
    case 4: return add_tiles<Numbers, 4>(frame, rows, steps, count, panel, are_first, sums);
#endif
  }
}

template <typename Numbers>
constexpr Functions FUNCTIONS{
    LANES, MAX_VECTORS, rows_of_tile, pack, add_products<Numbers>, unpack, pair_rows};

constexpr const Functions& OF_FLOATS = FUNCTIONS<Floats>;
constexpr const Functions& OF_PAIRS = FUNCTIONS<Pairs>;

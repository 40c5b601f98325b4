// The loops of product.cpp for factors that are rounded to bfloat16. They are compiled once for each
// instruction set.

#include "pair_loops.h"

constexpr uint32_t EXPONENT = 0x7f800000;

// Return what rounding takes off the numbers; 0 if it makes them infinite.
ALWAYS_INLINE Vector lost(Vector x) {
  const Vector high = rounded(x);
  return (Bits((Bits)high & EXPONENT) == EXPONENT) ? Vector{} : x - high;
}

// Return the pairs of two steps: of the numbers, or of what rounding takes off them.
template <bool ARE_LOW>
ALWAYS_INLINE Vector pairs_of(Vector first, Vector second) {
  if constexpr (ARE_LOW) {
    first = lost(first);
    second = lost(second);
  }
  return pairs_of(first, second);
}

// The lines of a factor: the rows of a, or the columns of b.
struct Lines {
  const float* first;
  int64_t line, step;  // the distances of lines and of steps
  int64_t lines, steps;
};

// Return the pairs of 2 LANES adjacent steps of a line.
template <bool ARE_LOW>
ALWAYS_INLINE Vector pairs_of_line(const float* from) {
  const Vector left = load(from), right = load(from + LANES);
  return pairs_of<ARE_LOW>(even(left, right), odd(left, right));
}

// Write the pairs of LANES lines and 2 LANES steps, whose lines or steps are adjacent, in the other order:
// those of a step are adjacent if those of a line were.
template <bool ARE_LOW>
inline void transpose_pairs(const float* from, int64_t line, int64_t step, float* to, int64_t pitch) {
  Vector block[LANES];
  if (step == 1) {
    ROLLED for (int64_t i = 0; i < LANES; ++i) block[i] = pairs_of_line<ARE_LOW>(from + i * line);
  } else {
    ROLLED for (int64_t i = 0; i < LANES; ++i) {
      block[i] = pairs_of<ARE_LOW>(load(from + 2 * i * step), load(from + (2 * i + 1) * step));
    }
  }
  transpose(block);
  UNROLLED(16) for (int64_t i = 0; i < LANES; ++i) store(to + i * pitch, block[i]);
}

// Write the pairs of at most LANES lines and 2 LANES steps, and zeros in the place of the others.
template <bool ARE_LOW>
void pack_part(
    const float* from, const Lines& of, int64_t lines, int64_t steps, bool by_line, float* to,
    int64_t pitch) {
  float whole[2 * LANES * LANES] = {};
  for (int64_t i = 0; i < std::min<int64_t>(lines, LANES); ++i) {
    for (int64_t step = 0; step < std::min<int64_t>(steps, 2 * LANES); ++step) {
      whole[2 * LANES * i + step] = from[i * of.line + step * of.step];
    }
  }
  if (!by_line) return transpose_pairs<ARE_LOW>(whole, 2 * LANES, 1, to, pitch);
  for (int64_t i = 0; i < LANES; ++i) store(to + i * pitch, pairs_of_line<ARE_LOW>(whole + 2 * LANES * i));
}

// Write the pairs of a factor whose adjacent numbers stay adjacent: of whole vectors, row by row as they
// are read.
template <bool ARE_LOW, typename Place>
ALWAYS_INLINE void pack_in_order(
    const Lines& of, int64_t lines, int64_t pairs, bool by_line, const Place& place) {
  if (by_line) {
    for (int64_t line = 0; line < lines; ++line) {
      const float* from = of.first + line * of.line;
      for (int64_t pair = 0; pair < pairs; pair += LANES) {
        store(place(line, pair), pairs_of_line<ARE_LOW>(from + 2 * pair));
      }
    }
    return;
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const float *first = of.first + 2 * pair * of.step, *second = first + of.step;
    for (int64_t line = 0; line < lines; line += LANES) {
      __builtin_prefetch(first + 8 * of.step + line);  // the processor does not foresee other pages
      __builtin_prefetch(second + 8 * of.step + line);
      store(place(line, pair), pairs_of<ARE_LOW>(load(first + line), load(second + line)));
    }
  }
}

// Write the pairs of lines, those of a line from `place(line, pair)` on if they are `by_line`, else those
// of a pair. Lines and pairs are filled up with zeros: pairs to whole PAIRS, and lines to the given
// number, a multiple of LANES.
template <bool ARE_LOW, typename Place>
inline void pack_lines(
    const Lines& of, int64_t all_lines, bool by_line, int64_t pitch, const Place& place) {
  const bool has_vectors = of.step == 1 || of.line == 1, is_in_order = by_line == (of.step == 1);
  const int64_t all_pairs = pairs_for(of.steps);
  const int64_t lines = has_vectors ? of.lines / LANES * LANES : 0;
  const int64_t pairs = has_vectors ? of.steps / (2 * LANES) * LANES : 0;
  const auto pack_block = [&](int64_t line, int64_t pair) INLINE {
    const float* from = of.first + line * of.line + 2 * pair * of.step;
    if (line >= lines || pair >= pairs) {
      pack_part<ARE_LOW>(from, of, of.lines - line, of.steps - 2 * pair, by_line, place(line, pair), pitch);
    } else if (!is_in_order) {
      transpose_pairs<ARE_LOW>(from, of.line, of.step, place(line, pair), pitch);
    }
  };
  if (is_in_order) pack_in_order<ARE_LOW>(of, lines, pairs, by_line, place);
  if (of.step == 1) {
    for (int64_t line = 0; line < all_lines; line += LANES) {
      for (int64_t pair = 0; pair < all_pairs; pair += LANES) pack_block(line, pair);
    }
  } else {
    for (int64_t pair = 0; pair < all_pairs; pair += LANES) {
      for (int64_t line = 0; line < all_lines; line += LANES) pack_block(line, pair);
    }
  }
}

// Add the products of a tile without instructions for pairs.
inline void add_pairs(
    const float* a, int64_t pitch, const float* panel, int64_t pairs, float* sums, bool are_first) {
  Vector tile[TILE][MAX_VECTORS] = {};
  const auto each = [](const auto& function) INLINE {
    for_each_vector<MAX_VECTORS>(bfloat16::COLUMNS, function);
  };
  if (!are_first) each([&](int row, int v, int64_t place) INLINE { tile[row][v] = load(sums + place); });
  for (int64_t pair = 0; pair < pairs; ++pair, panel += bfloat16::COLUMNS) {
    Bits factors[MAX_VECTORS];
    for (int v = 0; v < MAX_VECTORS; ++v) factors[v] = (Bits)load(panel + v * LANES);
    UNROLLED(8) for (int row = 0; row < TILE; ++row) {
      uint32_t of_row;
      std::memcpy(&of_row, a + row * pitch + pair, sizeof of_row);
      const Bits factor = Bits{} + of_row;
      UNROLLED(2) for (int v = 0; v < MAX_VECTORS; ++v) {
        tile[row][v] += lower(factors[v]) * lower(factor);
        tile[row][v] += upper(factors[v]) * upper(factor);
      }
    }
  }
  each([&](int row, int v, int64_t place) INLINE { store(sums + place, tile[row][v]); });
}

void add_rows_of_pairs(
    const float* a, int64_t pitch, int64_t rows, const float* panel, int64_t pairs, int64_t columns,
    float* sums, bool are_first) {
  for (int64_t row = 0; row < rows; row += TILE) {
    for (int64_t column = 0; column < columns; column += WIDTH) {
      add_pairs(a + row * pitch, pitch, panel + column, pairs, sums + row * bfloat16::COLUMNS + column, are_first);
    }
  }
}

constexpr bfloat16::Multiplier MULTIPLIER{TILE, add_rows_of_pairs};

// Finish the sums of a panel and write them to their target.
inline void write_sums(const float* sums, const Target& to, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; row += TILE) {
    for (int64_t column = 0; column < columns; column += WIDTH) {
      Vector tile[TILE][MAX_VECTORS];
      const float* from = sums + row * bfloat16::COLUMNS + column;
      for_each_vector<MAX_VECTORS>(bfloat16::COLUMNS, [&](int i, int v, int64_t place) INLINE {
        tile[i][v] = load(from + place);
      });
      const int64_t there = rows - row, wide = columns - column;
      if (there >= TILE && wide >= WIDTH) write_tile(tile, to.at(row, column));
      else write_part(tile, to.at(row, column), std::min<int64_t>(there, TILE), std::min(wide, WIDTH));
    }
  }
}

// Write the pairs of both factors, rounded or of what rounding takes off.
template <bool ARE_LOW>
void pack_factors(const Lines& rows, const Lines& columns, const PairMemory& memory) {
  pack_lines<ARE_LOW>(rows, memory.all_rows, true, memory.pitch, [&](int64_t line, int64_t pair) INLINE {
    return memory.row(ARE_LOW, line) + pair;
  });
  pack_lines<ARE_LOW>(columns, memory.all_columns, false, bfloat16::COLUMNS, [&](int64_t line, int64_t pair) INLINE {
    return memory.panel(ARE_LOW, line) + pair * bfloat16::COLUMNS + line % bfloat16::COLUMNS;
  });
}

// Write the panels of a factor, (steps, columns).
void pack_factor(const float* b, int64_t steps, int64_t columns, float* panels) {
  const Lines lines{b, 1, columns, columns, steps};
  const int64_t all_columns = tiles::round_up(columns, bfloat16::COLUMNS);
  pack_lines<false>(lines, all_columns, false, bfloat16::COLUMNS, [&](int64_t line, int64_t pair) INLINE {
    return panels + line / bfloat16::COLUMNS * pair_panel(steps) + pair * bfloat16::COLUMNS +
           line % bfloat16::COLUMNS;
  });
}

// Multiply rows, which are rounded first, with the panels of a factor.
void multiply_rows_of_pairs(
    const bfloat16::Multiplier& by, const float* a, int64_t a_pitch, const float* panels, int64_t steps,
    const Target& to, int64_t rows, int64_t columns) {
  const int64_t pairs = pairs_for(steps), pitch = padded(pairs);
  const int64_t all_rows = tiles::round_up(rows, by.rows);
  // The tiles of the last rows may be higher where sums are finished.
  const int64_t sums = padded((all_rows + TILE) * bfloat16::COLUMNS);
  const Buffer buffer(sums + all_rows * pitch);
  float* const left = buffer.data() + sums;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t pair = 0; pair < pairs; pair += LANES) {
      const float* from = a + row * a_pitch + 2 * pair;
      const int64_t there = steps - 2 * pair;
      float part[2 * LANES] = {};
      if (there < 2 * LANES) {
        if (there > 0) std::memcpy(part, from, size_t(there) * sizeof(float));
        from = part;
      }
      store(left + row * pitch + pair, pairs_of_line<false>(from));
    }
  }
  std::memset(left + rows * pitch, 0, size_t((all_rows - rows) * pitch) * sizeof(float));
  for (int64_t column = 0; column < columns; column += bfloat16::COLUMNS, panels += pair_panel(steps)) {
    const int64_t wide = std::min(columns - column, bfloat16::COLUMNS);
    by.add(left, pitch, all_rows, panels, tiles::divide_up(steps, 2), wide, buffer.data(), true);
    write_sums(buffer.data(), to.at(0, column), rows, wide);
  }
}

// Multiply a block whose factors are rounded, or split into what is rounded and what rounding takes off.
void multiply_pairs(
    const Work& work, const Block& block, const bfloat16::Multiplier& by, const PairMemory& memory) {
  const View &a = work.a.view, &b = work.b.view;
  const bool is_split = work.precision == Precision::BF16X3;
  Target to = target_of(work, block);
  for (int64_t step = 0; step < work.sizes.steps; step += STEPS) {
    const int64_t steps = std::min(STEPS, work.sizes.steps - step);
    const bool is_last = step + steps == work.sizes.steps;
    const Lines rows{block.a + step * a.column, a.row, a.column, block.rows, steps};
    const Lines columns{block.b + step * b.row, b.column, b.row, block.columns, steps};
    pack_factors<false>(rows, columns, memory);
    if (is_split) pack_factors<true>(rows, columns, memory);
    for (int64_t column = 0; column < block.columns; column += bfloat16::COLUMNS) {
      const int64_t wide = std::min(block.columns - column, bfloat16::COLUMNS);
      float* sums = memory.sums(column);
      const auto add = [&](int64_t low_a, int64_t low_b, bool are_first) {
        by.add(memory.row(low_a, 0), memory.pitch, tiles::round_up(block.rows, by.rows), memory.panel(low_b, column),
               tiles::divide_up(steps, 2), wide, sums, are_first);
      };
      // The smallest products first. Those of two low parts are smaller than the error of the others.
      if (is_split) {
        add(1, 0, step == 0);
        add(0, 1, false);
      }
      add(0, 0, step == 0 && !is_split);
      if (is_last) write_sums(sums, to.at(0, column), block.rows, wide);
    }
  }
}

// The transforms of winograd.cpp. They are compiled once for each instruction set.

#include "pair_loops.h"

// Return a row of a matrix times a vector: the sum of the first columns.
template <typename Matrix, int ROW, int COLUMN = Matrix::COLUMNS - 1>
inline Vector multiply_row(const Vector* from, int pitch) {
  constexpr float factor = Matrix::at(ROW, COLUMN);
  if constexpr (factor == 0) {
    return multiply_row<Matrix, ROW, COLUMN - 1>(from, pitch);
  } else {
    const Vector number = from[COLUMN * pitch];
    const Vector product = factor == 1 ? number : factor == -1 ? -number : factor * number;
    if constexpr (Matrix::first(ROW) == COLUMN) {
      return product;
    } else {
      return multiply_row<Matrix, ROW, COLUMN - 1>(from, pitch) + product;
    }
  }
}

template <typename Matrix, int ROW = 0>
inline void multiply(const Vector* from, int from_pitch, Vector* to, int to_pitch) {
  to[ROW * to_pitch] = multiply_row<Matrix, ROW>(from, from_pitch);
  if constexpr (ROW + 1 < Matrix::ROWS) multiply<Matrix, ROW + 1>(from, from_pitch, to, to_pitch);
}

// Write M x N^T, with x of (M::COLUMNS, N::COLUMNS).
template <typename M, typename N>
inline void multiply_both(const Vector* from, Vector* to) {
  Vector half[M::ROWS][N::COLUMNS];
  UNROLLED(6) for (int i = 0; i < N::COLUMNS; ++i) multiply<M>(from + i, N::COLUMNS, half[0] + i, N::COLUMNS);
  UNROLLED(6) for (int i = 0; i < M::ROWS; ++i) multiply<N>(half[i], 1, to + i * N::ROWS, 1);
}

template <int ROWS, int COLUMNS>
struct Loops {
  using OfRows = winograd::Scheme<ROWS>;
  using OfColumns = winograd::Scheme<COLUMNS>;
  static constexpr int ELEMENTS = OfRows::ELEMENTS * OfColumns::ELEMENTS;
  static constexpr int WINDOWS = OfRows::WINDOWS * OfColumns::WINDOWS;
  static constexpr int TAPS = ROWS * COLUMNS;
  static_assert(OfColumns::WINDOWS == 2, "even and odd columns of pixels");

  // Compute B^T d B of LANES tiles.
  static inline void elements_of_pixels(
      const float* frame, int64_t plane, int64_t pitch, Vector (&elements)[ELEMENTS]) {
    Vector pixels[ELEMENTS];
    UNROLLED(6) for (int row = 0; row < OfRows::ELEMENTS; ++row) {
      const float* from = frame + row % OfRows::WINDOWS * plane + row / OfRows::WINDOWS * pitch;
      UNROLLED(3) for (int column = 0; column < OfColumns::ELEMENTS; column += 2) {
        const Vector left = load(from + column), right = load(from + column + LANES);
        pixels[row * OfColumns::ELEMENTS + column] = even(left, right);
        pixels[row * OfColumns::ELEMENTS + column + 1] = odd(left, right);
      }
    }
    multiply_both<OfPixels<OfRows>, OfPixels<OfColumns>>(pixels, elements);
  }

  // Write B^T d B of tiles: element k of tile t to to[k distance + t]. The pixels of LANES tiles can
  // be read, and their elements written, where fewer are left.
  static void transform_pixels(
      const float* frame, int64_t plane, int64_t pitch, int64_t tiles, float* to,
      int64_t distance) {
    for (int64_t tile = 0; tile < tiles; tile += LANES, frame += 2 * LANES, to += LANES) {
      Vector elements[ELEMENTS];
      elements_of_pixels(frame, plane, pitch, elements);
      UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) store(to + k * distance, elements[k]);
    }
  }

  // The same for the pairs of tiles in two frames.
  static void transform_pixel_pairs(
      const float* frame, const float* second, int64_t plane, int64_t pitch, int64_t tiles, float* to,
      int64_t distance) {
    for (int64_t tile = 0; tile < tiles; tile += LANES, to += LANES) {
      Vector elements[2][ELEMENTS];
      elements_of_pixels(frame + 2 * tile, plane, pitch, elements[0]);
      elements_of_pixels(second + 2 * tile, plane, pitch, elements[1]);
      UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) {
        store(to + k * distance, pairs_of(elements[0][k], elements[1][k]));
      }
    }
  }

  // The same for pairs of adjacent tiles. 2 LANES tiles can be read.
  static void transform_adjacent_pixels(
      const float* frame, int64_t plane, int64_t pitch, int64_t tiles, float* to,
      int64_t distance) {
    for (int64_t tile = 0; tile < tiles; tile += 2 * LANES, frame += 4 * LANES, to += LANES) {
      Vector left[ELEMENTS], right[ELEMENTS];
      elements_of_pixels(frame, plane, pitch, left);
      elements_of_pixels(frame + 2 * LANES, plane, pitch, right);
      UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) {
        store(to + k * distance, pairs_of(even(left[k], right[k]), odd(left[k], right[k])));
      }
    }
  }

  // Write G g G^T of filters: element k of filter (channel, column) to to[k distance + channel width +
  // column], from[(TAPS channel + tap) width + column] being their taps.
  static void transform_filters(
      const float* from, int64_t channels, int64_t width, bool are_flipped, float* to,
      int64_t distance) {
    for (int64_t channel = 0; channel < channels; ++channel, from += TAPS * width) {
      for (int64_t column = 0; column < width; column += LANES, to += LANES) {
        Vector taps[TAPS], elements[ELEMENTS];
        UNROLLED(9) for (int tap = 0; tap < TAPS; ++tap) {
          taps[tap] = load(from + (are_flipped ? TAPS - 1 - tap : tap) * width + column);
        }
        multiply_both<OfFilters<OfRows>, OfFilters<OfColumns>>(taps, elements);
        UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) store(to + k * distance, elements[k]);
      }
    }
  }

  // Write A^T m A of tiles, whose element k is sums[k distance + tile width + column]: window i to
  // to[places[WINDOWS tile + i] width + column].
  static void transform_sums(
      const float* sums, int64_t distance, const int64_t* places, int64_t tiles, int64_t width,
      float* to) {
    for (int64_t tile = 0; tile < tiles; ++tile, places += WINDOWS) {
      for (int64_t column = 0; column < width; column += LANES, sums += LANES) {
        Vector elements[ELEMENTS], windows[WINDOWS];
        UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) elements[k] = load(sums + k * distance);
        multiply_both<OfSums<OfRows>, OfSums<OfColumns>>(elements, windows);
        UNROLLED(4) for (int i = 0; i < WINDOWS; ++i) store(to + places[i] * width + column, windows[i]);
      }
    }
  }

  // Compute A dy A^T of a tile and LANES columns.
  static inline void elements_of_gradients(
      const float* from, const int64_t* places, int64_t width, Vector (&elements)[ELEMENTS]) {
    Vector windows[WINDOWS];
    UNROLLED(4) for (int i = 0; i < WINDOWS; ++i) windows[i] = load(from + places[i] * width);
    multiply_both<Transposed<OfSums<OfRows>>, Transposed<OfSums<OfColumns>>>(windows, elements);
  }

  // Write A dy A^T of tiles, whose window i is from[places[WINDOWS tile + i] width + column]: element
  // k to to[k distance + tile width + column].
  static void transform_gradients(
      const float* from, const int64_t* places, int64_t tiles, int64_t width, float* to,
      int64_t distance) {
    for (int64_t tile = 0; tile < tiles; ++tile, places += WINDOWS) {
      for (int64_t column = 0; column < width; column += LANES, to += LANES) {
        Vector elements[ELEMENTS];
        elements_of_gradients(from + column, places, width, elements);
        UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) store(to + k * distance, elements[k]);
      }
    }
  }

  // The same for pairs of adjacent tiles, an even number of tiles.
  static void transform_gradient_pairs(
      const float* from, const int64_t* places, int64_t tiles, int64_t width, float* to,
      int64_t distance) {
    for (int64_t tile = 0; tile < tiles; tile += 2, places += 2 * WINDOWS) {
      for (int64_t column = 0; column < width; column += LANES, to += LANES) {
        Vector elements[2][ELEMENTS];
        elements_of_gradients(from + column, places, width, elements[0]);
        elements_of_gradients(from + column, places + WINDOWS, width, elements[1]);
        UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) {
          store(to + k * distance, pairs_of(elements[0][k], elements[1][k]));
        }
      }
    }
  }

  // Write G^T s G of filters, whose element k is sums[k distance + channel width + column]: tap t to
  // to[(TAPS channel + t) width + column].
  static void transform_filter_sums(
      const float* sums, int64_t distance, int64_t channels, int64_t width, float* to) {
    for (int64_t channel = 0; channel < channels; ++channel, to += TAPS * width) {
      for (int64_t column = 0; column < width; column += LANES, sums += LANES) {
        Vector elements[ELEMENTS], taps[TAPS];
        UNROLLED(16) for (int k = 0; k < ELEMENTS; ++k) elements[k] = load(sums + k * distance);
        multiply_both<Transposed<OfFilters<OfRows>>, Transposed<OfFilters<OfColumns>>>(
            elements, taps);
        UNROLLED(9) for (int tap = 0; tap < TAPS; ++tap) store(to + tap * width + column, taps[tap]);
      }
    }
  }

  static constexpr Transforms TRANSFORMS{
      LANES,
      ELEMENTS,
      TAPS,
      {{OfRows::WINDOWS, OfRows::ELEMENTS}, {OfColumns::WINDOWS, OfColumns::ELEMENTS}},
      transform_pixels,
      transform_adjacent_pixels,
      transform_pixel_pairs,
      transform_filters,
      transform_sums,
      transform_gradients,
      transform_gradient_pairs,
      transform_filter_sums};
};

const Transforms* transforms_of(int64_t rows, int64_t columns) {
  if (rows == 3 && columns == 3) return &Loops<3, 3>::TRANSFORMS;
  if (rows == 1 && columns == 3) return &Loops<1, 3>::TRANSFORMS;
  if (rows == 1 && columns == 5) return &Loops<1, 5>::TRANSFORMS;
  return nullptr;
}

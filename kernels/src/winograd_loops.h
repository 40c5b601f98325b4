// The transforms of winograd.cpp. They are compiled once for each instruction set.

inline Vector even(Vector a, Vector b) {
  Places places;
  for (int i = 0; i < LANES; ++i) places[i] = 2 * i;
  return __builtin_shuffle(a, b, places);
}

inline Vector odd(Vector a, Vector b) {
  Places places;
  for (int i = 0; i < LANES; ++i) places[i] = 2 * i + 1;
  return __builtin_shuffle(a, b, places);
}

// The rows of pixels that a row of tiles reads.
struct Rows {
  const float* of[4];
};

// A vector of a row of B^T d.
template <int ROW>
inline Vector row_of_pixels(const Rows& rows, int64_t place) {
  const auto row = [&](int i) { return load(rows.of[i] + place); };
  if constexpr (ROW == 0) return row(0) - row(2);
  if constexpr (ROW == 1) return row(1) + row(2);
  if constexpr (ROW == 2) return row(2) - row(1);
  return row(1) - row(3);
}

// Write a row of B^T d B for LANES tiles.
template <int ROW>
inline void transform_row_of_pixels(
    const Rows& rows, int64_t place, float* to, int64_t distance) {
  Vector at[3][2];  // the pixels 0, 1 and 2 further on
  for (int i = 0; i < 3; ++i) {
    at[i][0] = row_of_pixels<ROW>(rows, place + i);
    at[i][1] = row_of_pixels<ROW>(rows, place + i + LANES);
  }
  const Vector first = at[0][0] - at[2][0], second = at[0][1] - at[2][1];
  const Vector one = even(at[1][0], at[1][1]), two = odd(at[1][0], at[1][1]);
  to += 4 * ROW * distance;
  store(to, even(first, second));
  store(to + distance, one + two);
  store(to + 2 * distance, two - one);
  store(to + 3 * distance, odd(first, second));
}

// Write B^T d B of tiles: element k of tile t to to[k distance + t]. The pixels of LANES tiles can be
// read, and their elements written, where fewer are left.
void transform_pixels(
    const float* even_rows, const float* odd_rows, int64_t pitch, int64_t tiles, float* to,
    int64_t distance) {
  const Rows rows{{even_rows, odd_rows, even_rows + pitch, odd_rows + pitch}};
  for (int64_t tile = 0; tile < tiles; tile += LANES, to += LANES) {
    transform_row_of_pixels<0>(rows, 2 * tile, to, distance);
    transform_row_of_pixels<1>(rows, 2 * tile, to, distance);
    transform_row_of_pixels<2>(rows, 2 * tile, to, distance);
    transform_row_of_pixels<3>(rows, 2 * tile, to, distance);
  }
}

// Write G g G^T of filters: element k of filter (channel, column) to to[k distance + channel width +
// column], from[(9 channel + tap) width + column] being their taps.
void transform_filters(
    const float* from, int64_t channels, int64_t width, bool are_flipped, float* to,
    int64_t distance) {
  for (int64_t channel = 0; channel < channels; ++channel, from += 9 * width) {
    for (int64_t column = 0; column < width; column += LANES, to += LANES) {
      Vector rows[4][3];
      for (int tap = 0; tap < 3; ++tap) {
        Vector g[3];
        for (int i = 0; i < 3; ++i) {
          const int of_filter = 3 * i + tap;
          g[i] = load(from + (are_flipped ? 8 - of_filter : of_filter) * width + column);
        }
        const Vector outer = 0.5f * (g[0] + g[2]), inner = 0.5f * g[1];
        rows[0][tap] = g[0];
        rows[1][tap] = outer + inner;
        rows[2][tap] = outer - inner;
        rows[3][tap] = g[2];
      }
      for (int row = 0; row < 4; ++row) {
        const Vector* u = rows[row];
        const Vector outer = 0.5f * (u[0] + u[2]), inner = 0.5f * u[1];
        float* write = to + 4 * row * distance;
        store(write, u[0]);
        store(write + distance, outer + inner);
        store(write + 2 * distance, outer - inner);
        store(write + 3 * distance, u[2]);
      }
    }
  }
}

// Write A^T m A of tiles, whose element k is sums[k distance + tile width + column]: pixel p to
// to[places[4 tile + p] width + column].
void transform_sums(
    const float* sums, int64_t distance, const int64_t* places, int64_t tiles, int64_t width,
    float* to) {
  for (int64_t tile = 0; tile < tiles; ++tile, places += 4) {
    for (int64_t column = 0; column < width; column += LANES, sums += LANES) {
      Vector left[4], right[4];
      for (int row = 0; row < 4; ++row) {
        const float* read = sums + 4 * row * distance;
        const Vector one = load(read + distance), two = load(read + 2 * distance);
        left[row] = load(read) + one + two;
        right[row] = one - two - load(read + 3 * distance);
      }
      store(to + places[0] * width + column, left[0] + left[1] + left[2]);
      store(to + places[1] * width + column, right[0] + right[1] + right[2]);
      store(to + places[2] * width + column, left[1] - left[2] - left[3]);
      store(to + places[3] * width + column, right[1] - right[2] - right[3]);
    }
  }
}

// Write A dy A^T of tiles, whose pixel p is from[places[4 tile + p] width + column]: element k to
// to[k distance + tile width + column].
void transform_gradients(
    const float* from, const int64_t* places, int64_t tiles, int64_t width, float* to,
    int64_t distance) {
  for (int64_t tile = 0; tile < tiles; ++tile, places += 4) {
    for (int64_t column = 0; column < width; column += LANES, to += LANES) {
      const auto pixel = [=](int p) { return load(from + places[p] * width + column); };
      const Vector left[4] = {pixel(0), pixel(0) + pixel(2), pixel(0) - pixel(2), -pixel(2)};
      const Vector right[4] = {pixel(1), pixel(1) + pixel(3), pixel(1) - pixel(3), -pixel(3)};
      for (int row = 0; row < 4; ++row) {
        float* write = to + 4 * row * distance;
        store(write, left[row]);
        store(write + distance, left[row] + right[row]);
        store(write + 2 * distance, left[row] - right[row]);
        store(write + 3 * distance, -right[row]);
      }
    }
  }
}

// Write G^T s G of filters, whose element k is sums[k distance + channel width + column]: tap t to
// to[(9 channel + t) width + column].
void transform_filter_sums(
    const float* sums, int64_t distance, int64_t channels, int64_t width, float* to) {
  for (int64_t channel = 0; channel < channels; ++channel, to += 9 * width) {
    for (int64_t column = 0; column < width; column += LANES, sums += LANES) {
      Vector rows[4][3];
      for (int row = 0; row < 4; ++row) {
        const float* read = sums + 4 * row * distance;
        const Vector one = load(read + distance), two = load(read + 2 * distance);
        rows[row][0] = load(read) + 0.5f * (one + two);
        rows[row][1] = 0.5f * (one - two);
        rows[row][2] = 0.5f * (one + two) + load(read + 3 * distance);
      }
      for (int tap = 0; tap < 3; ++tap) {
        const Vector one = rows[1][tap], two = rows[2][tap];
        store(to + tap * width + column, rows[0][tap] + 0.5f * (one + two));
        store(to + (3 + tap) * width + column, 0.5f * (one - two));
        store(to + (6 + tap) * width + column, 0.5f * (one + two) + rows[3][tap]);
      }
    }
  }
}

constexpr Transforms TRANSFORMS{
    LANES, transform_pixels, transform_filters, transform_sums, transform_gradients,
    transform_filter_sums};

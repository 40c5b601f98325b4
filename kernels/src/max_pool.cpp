#include "max_pool.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "vectorized.h"

namespace max_pool {

template <typename T>
size_t Work<T>::elements() const {
  return static_cast<size_t>(axes[0].size * axes[1].size * axes[2].size);
}

template <typename T>
size_t Work<T>::windows() const {
  return static_cast<size_t>(axes[0].windows * axes[1].windows * axes[2].windows);
}

template <typename T>
size_t Work<T>::images_per_task() const {
  return std::max<size_t>(1, ELEMENTS_PER_TASK / std::max<size_t>(1, elements()));
}

template struct Work<float>;
template struct Work<double>;

namespace {

constexpr int64_t BLOCK = 64;   // windows side by side, which are searched at once
constexpr int64_t VECTOR = 16;  // loops over multiples of it become vector instructions alone

// Numbers from begin to end.
struct Range {
  int64_t begin, end;
};

bool is_empty(Range range) { return range.begin >= range.end; }

int64_t divide_up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// The taps of a window that are inside the image; `start` is where its first tap is.
Range taps_inside(const Axis& axis, int64_t start) {
  const int64_t end = divide_up(axis.size - start, axis.dilation);
  return {divide_up(-start, axis.dilation), std::min(axis.kernel, end)};
}

// The windows from `begin` to `end` of which a tap is inside the image.
Range windows_inside(const Axis& axis, int64_t tap, int64_t begin, int64_t end) {
  const int64_t start = tap * axis.dilation - axis.pad;
  const int64_t first = divide_up(-start, axis.stride);
  return {std::max(begin, first), std::min(end, divide_up(axis.size - start, axis.stride))};
}

// The largest element so far of each window in a block, and its distance from the first tap of its
// window. Distances are numbers of type T, which become parts of the same vector instructions.
template <typename T>
struct Maxima {
  T values[BLOCK], distances[BLOCK];
};

template <typename T>
ALWAYS_INLINE void copy_every(int64_t stride, const T* x, int64_t n, T* copies) {
  if (stride == 2) {
    for (int64_t i = 0; i < n; ++i) copies[i] = x[2 * i];
  } else {
    for (int64_t i = 0; i < n; ++i) copies[i] = x[i * stride];
  }
}

template <typename T>
ALWAYS_INLINE void keep_larger(
    const T* RESTRICT x, T here, T* RESTRICT values, T* RESTRICT distances, int64_t n) {
  INDEPENDENT for (int64_t i = 0; i < n; ++i) {
    const bool first_number = (distances[i] < T(0)) & (x[i] == x[i]);
    const bool larger = x[i] > values[i];
    distances[i] = (larger | first_number) ? here : distances[i];
    values[i] = larger ? x[i] : values[i];
  }
}

// Compare the taps in one row of each window. A tap outside of the image is NaN, which is no
// maximum.
template <typename T>
ALWAYS_INLINE void search_row(
    const Axis& columns, const T* row, int64_t distance, int64_t begin, int64_t end,
    Maxima<T>& maxima) {
  T taps[BLOCK];
  const int64_t padded = divide_up(end - begin, VECTOR) * VECTOR;
  for (int64_t tap = 0; tap < columns.kernel; ++tap) {
    const Range inside = windows_inside(columns, tap, begin, end);
    if (inside.end - inside.begin < padded) {
      std::fill_n(taps, padded, std::numeric_limits<T>::quiet_NaN());
    }
    const int64_t first = inside.begin * columns.stride + tap * columns.dilation - columns.pad;
    if (inside.begin < inside.end) {
      copy_every(columns.stride, row + first, inside.end - inside.begin, taps + (inside.begin - begin));
    }
    const T here = static_cast<T>(distance + tap * columns.dilation);
    keep_larger(taps, here, maxima.values, maxima.distances, padded);
  }
}

template <typename T>
ALWAYS_INLINE void run_image(const std::array<Axis, AXES>& axes, const T* x, const T* dy, T* dx) {
  const auto& [planes, rows, columns] = axes;
  Maxima<T> maxima;
  for (int64_t i = 0; i < planes.windows; ++i) {
    const int64_t plane = i * planes.stride - planes.pad;
    const Range in_depth = taps_inside(planes, plane);
    for (int64_t j = 0; j < rows.windows; ++j) {
      const int64_t row = j * rows.stride - rows.pad;
      const Range in_height = taps_inside(rows, row);
      for (int64_t k = 0; k < columns.windows; k += BLOCK) {
        const int64_t end = std::min(k + BLOCK, columns.windows);
        std::fill_n(maxima.values, BLOCK, -std::numeric_limits<T>::infinity());
        std::fill_n(maxima.distances, BLOCK, T(-1));
        for (int64_t p = in_depth.begin; p < in_depth.end; ++p) {
          for (int64_t q = in_height.begin; q < in_height.end; ++q) {
            const int64_t line = (p * planes.dilation * rows.size + q * rows.dilation);
            const T* first = x + ((plane * rows.size + row) + line) * columns.size;
            search_row(columns, first, line * columns.size, k, end, maxima);
          }
        }
        T* start = dx + (plane * rows.size + row) * columns.size - columns.pad;
        for (int64_t w = k; w < end; ++w, ++dy) {
          int64_t distance = static_cast<int64_t>(maxima.distances[w - k]);
          if (distance < 0) {  // a window of NaN, or without an element
            const Range in_width = taps_inside(columns, w * columns.stride - columns.pad);
            if (is_empty(in_depth) || is_empty(in_height) || is_empty(in_width)) continue;
            distance = in_width.begin * columns.dilation +
                       columns.size * (in_height.begin * rows.dilation +
                                       rows.size * in_depth.begin * planes.dilation);
          }
          start[w * columns.stride + distance] += *dy;
        }
      }
    }
  }
}

// Write the slope of each window to the position of its first maximum, and 0 to its other
// positions.
template <typename T>
ALWAYS_INLINE void choose_first_maximum(
    T* RESTRICT first, T* RESTRICT second, T* RESTRICT third, T* RESTRICT fourth,
    const T* RESTRICT slopes, int64_t n) {
  INDEPENDENT for (int64_t i = 0; i < n; ++i) {
    const T a = first[i], b = second[i], c = third[i], d = fourth[i], slope = slopes[i];
    T most = a == a ? a : -std::numeric_limits<T>::infinity();
    T position = 0;
    position = b > most ? T(1) : position;
    most = b > most ? b : most;
    position = c > most ? T(2) : position;
    most = c > most ? c : most;
    position = d > most ? T(3) : position;
    first[i] = position == T(0) ? slope : T(0);
    second[i] = position == T(1) ? slope : T(0);
    third[i] = position == T(2) ? slope : T(0);
    fourth[i] = position == T(3) ? slope : T(0);
  }
}

// Squares of four elements side by side, in several rows of windows at once if these are short. The
// first loop brings the elements of a window apart; the last one puts their gradients back together.
template <typename T>
ALWAYS_INLINE void run_halving_image(
    const std::array<Axis, AXES>& axes, const T* x, const T* dy, T* dx) {
  const int64_t width = axes[2].size, windows = axes[2].windows;
  const int64_t row_step = std::max<int64_t>(1, BLOCK / std::max<int64_t>(1, windows));
  T of[4][BLOCK] = {}, slopes[BLOCK] = {};
  for (int64_t j = 0; j < axes[1].windows; j += row_step) {
    const int64_t rows = std::min(row_step, axes[1].windows - j);
    for (int64_t k = 0; k < windows; k += BLOCK) {
      const int64_t n = std::min(BLOCK, windows - k);
      for (int64_t row = 0; row < rows; ++row) {
        const T *above = x + 2 * (j + row) * width + 2 * k, *below = above + width;
        const T* slope = dy + (j + row) * windows + k;
        for (int64_t i = 0, to = row * n; i < n; ++i, ++to) {
          of[0][to] = above[2 * i];
          of[1][to] = above[2 * i + 1];
          of[2][to] = below[2 * i];
          of[3][to] = below[2 * i + 1];
          slopes[to] = slope[i];
        }
      }
      const int64_t padded = divide_up(rows * n, VECTOR) * VECTOR;
      choose_first_maximum(of[0], of[1], of[2], of[3], slopes, padded);
      for (int64_t row = 0; row < rows; ++row) {
        T *above = dx + 2 * (j + row) * width + 2 * k, *below = above + width;
        for (int64_t i = 0, from = row * n; i < n; ++i, ++from) {
          above[2 * i] = of[0][from];
          above[2 * i + 1] = of[1][from];
          below[2 * i] = of[2][from];
          below[2 * i + 1] = of[3][from];
        }
      }
    }
  }
}

bool is_one(const Axis& axis) {
  return axis.size == 1 && axis.windows == 1 && axis.kernel == 1 && axis.pad == 0;
}

bool is_halved(const Axis& axis) {
  return axis.kernel == 2 && axis.stride == 2 && axis.dilation == 1 && axis.pad == 0 &&
         axis.windows == axis.size / 2;
}

bool is_even(const Axis& axis) { return is_halved(axis) && axis.size % 2 == 0; }

// Return the axes of several images that lie behind each other as those of one image, and their number:
// 1 if a window would reach from one image into the next.
std::pair<std::array<Axis, AXES>, int64_t> joined(std::array<Axis, AXES> axes, int64_t images) {
  const bool has_rows = !is_one(axes[1]);
  const bool fits = is_one(axes[0]) && is_even(axes[2]) && (!has_rows || is_even(axes[1]));
  if (!fits) images = 1;
  Axis& outer = axes[has_rows ? 1 : 2];
  outer.size *= images;
  outer.windows *= images;
  return {axes, images};
}

template <typename T>
ALWAYS_INLINE void run_task(const Work<T>& work, size_t task) {
  const size_t first = task * work.images_per_task();
  const size_t last = std::min(first + work.images_per_task(), work.images);
  const auto [axes, images] = joined(work.axes, int64_t(last - first));
  const bool halves = is_one(axes[0]) && is_halved(axes[1]) && is_halved(axes[2]);
  const bool covers_all = halves && is_even(axes[1]) && is_even(axes[2]);
  const size_t elements = work.elements() * size_t(images);
  for (size_t i = first; i < last; i += size_t(images)) {
    const T *x = work.x + i * work.elements(), *dy = work.dy + i * work.windows();
    T* dx = work.dx + i * work.elements();
    if (!covers_all) std::fill_n(dx, elements, T(0));
    if (halves) {
      run_halving_image(axes, x, dy, dx);
    } else {
      run_image(axes, x, dy, dx);
    }
  }
}

}  // namespace

void run(const Work<float>& work, size_t task) { vectorized<run_task<float>>(work, task); }
void run(const Work<double>& work, size_t task) { vectorized<run_task<double>>(work, task); }

}  // namespace max_pool

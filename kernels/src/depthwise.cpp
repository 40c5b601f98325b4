#include "depthwise.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "rows.h"
#include "vectorized.h"

namespace depthwise {

namespace {

using convolution::copy_rows;

constexpr int64_t VECTOR = 16;  // loops over multiples of it become vector instructions alone
constexpr int64_t LANES = 64;   // partial sums of a weight's gradient
constexpr size_t TAPS_AT_ONCE = 9;

int64_t divide_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
int64_t round_up(int64_t n, int64_t factor) { return divide_up(n, factor) * factor; }

// By how many elements of a plane the last tap is behind the first one.
int64_t reach(const Axis& axis) { return (axis.kernel - 1) * axis.dilation / axis.stride; }

// One plane of several images.
struct Plane {
  int64_t images, rows, columns;

  int64_t elements() const { return images * rows * columns; }
  int64_t at(int64_t image, int64_t row) const { return (image * rows + row) * columns; }
};

// The images and channels of a task.
struct Part {
  int64_t first_image, end_image, first_channel, end_channel;
  int64_t images() const { return end_image - first_image; }
};

Part part_of(const Work& work, int64_t task) {
  const int64_t image = task / work.channel_groups() * work.images_per_task();
  const int64_t channel = task % work.channel_groups() * work.channels_per_task();
  return {image, std::min(image + work.images_per_task(), work.images), channel,
          std::min(channel + work.channels_per_task(), work.channels)};
}

struct Taps {
  int64_t count = 0, offsets[MAX_TAPS];
  float weights[MAX_TAPS];

  void add(int64_t offset, float weight) {
    offsets[count] = offset;
    weights[count++] = weight;
  }
};

// result = start + sum over taps of their weight times the elements from their offset on; without
// `FIRST`, the result is added to instead.
template <bool FIRST, size_t... TAP>
ALWAYS_INLINE void add_shifted(
    const float* frame, const Taps& taps, int64_t first_tap, float start, float* RESTRICT result,
    int64_t n, std::index_sequence<TAP...>) {
  const float weights[] = {taps.weights[first_tap + TAP]...};
  const float* shifted[] = {frame + taps.offsets[first_tap + TAP]...};
  INDEPENDENT for (int64_t i = 0; i < n; ++i) {
    float sum = FIRST ? start : result[i];
    ((sum += weights[TAP] * shifted[TAP][i]), ...);
    result[i] = sum;
  }
}

// Call function(first tap, an index sequence of their number) for all taps, some at once.
template <typename Function>
ALWAYS_INLINE void for_taps(int64_t count, const Function& function) {
  int64_t first = 0;
  for (; first + int64_t(TAPS_AT_ONCE) <= count; first += TAPS_AT_ONCE) {
    function(first, std::make_index_sequence<TAPS_AT_ONCE>());
  }
  for (; first + 4 <= count; first += 4) function(first, std::make_index_sequence<4>());
  for (; first + 2 <= count; first += 2) function(first, std::make_index_sequence<2>());
  if (first < count) function(first, std::make_index_sequence<1>());
}

ALWAYS_INLINE void sum_shifted(
    const float* frame, const Taps& taps, float start, float* result, int64_t n) {
  if (!taps.count) std::fill_n(result, n, start);
  for_taps(taps.count, [&](int64_t first, auto sequence) INLINE {
    if (first == 0) {
      add_shifted<true>(frame, taps, first, start, result, n, sequence);
    } else {
      add_shifted<false>(frame, taps, first, start, result, n, sequence);
    }
  });
}

template <size_t... TAP>
ALWAYS_INLINE void add_products(
    const float* frame, const int64_t* offsets, const float* small, float* sums, int64_t n,
    std::index_sequence<TAP...>) {
  const float* shifted[] = {frame + offsets[TAP]...};
  for (int64_t i = 0; i < n; i += LANES) {
    INDEPENDENT for (int64_t lane = 0; lane < LANES; ++lane) {
      const float factor = small[i + lane];
      ((sums[TAP * LANES + lane] += factor * shifted[TAP][i + lane]), ...);
    }
  }
}

// Put the columns of pieces, of which each has another remainder, beside each other, without pads.
ALWAYS_INLINE void interleave(
    const float* pieces, int64_t distance, const Axis& columns, float* RESTRICT to) {
  if (columns.stride == 2) {  // even and odd pixels at once become vector instructions
    const int64_t odd_pad = columns.pad % 2, pairs = columns.pixels / 2;
    const float* even = pieces + odd_pad * distance + columns.pad / 2;
    const float* odd = pieces + (1 - odd_pad) * distance + (columns.pad + 1) / 2;
    for (int64_t i = 0; i < pairs; ++i) {
      to[2 * i] = even[i];
      to[2 * i + 1] = odd[i];
    }
    if (columns.pixels % 2) to[2 * pairs] = even[pairs];
    return;
  }
  for (int64_t i = 0; i < columns.pixels; ++i) {
    const int64_t padded = i + columns.pad;
    to[i] = pieces[padded % columns.stride * distance + padded / columns.stride];
  }
}

// The pixels of x that windows read, sorted by the remainders of their padded coordinates.
struct LargeFrame {
  Axes axes;
  Plane plane;
  std::vector<float> elements;  // of the planes; 0 where there is no pixel

  explicit LargeFrame(const Work& work) : axes(work.axes) {
    plane.rows = axes[0].windows + reach(axes[0]);
    plane.columns = axes[1].windows + reach(axes[1]);
    plane.images = work.images_per_task();
    const int64_t planes = axes[0].stride * axes[1].stride;
    const int64_t behind = reach(axes[0]) * plane.columns + reach(axes[1]) + LANES;
    elements.resize(planes * plane.elements() + behind);
    for (int64_t i = 0; i < axes[0].stride; ++i) row_runs.push_back(run(axes[0], plane.rows, i));
    for (int64_t j = 0; j < axes[1].stride; ++j) {
      column_runs.push_back(run(axes[1], plane.columns, j));
    }
  }

  int64_t offset(int64_t row_tap, int64_t column_tap) const {
    const int64_t row = row_tap * axes[0].dilation, column = column_tap * axes[1].dilation;
    const int64_t remainder =
        row % axes[0].stride * axes[1].stride + column % axes[1].stride;
    return remainder * plane.elements() + plane.at(0, row / axes[0].stride) +
           column / axes[1].stride;
  }

  ALWAYS_INLINE void fill(int64_t image, const float* x) {
    const auto& [rows, columns] = axes;
    for (int64_t i = 0; i < rows.stride; ++i) {
      const Run& of_rows = row_runs[i];
      const float* from = x + of_rows.pixel * columns.pixels;
      const int64_t pitch = rows.stride * columns.pixels;
      float* to = elements.data() + i * columns.stride * plane.elements() +
                  plane.at(image, of_rows.first);
      if (columns.stride == 1) {
        const int64_t count = std::min(columns.pixels, plane.columns - columns.pad);
        copy_rows(from, pitch, to + columns.pad, plane.columns, of_rows.count, count);
        continue;
      }
      for (int64_t row = 0; row < of_rows.count; ++row, from += pitch, to += plane.columns) {
        fill_split_row(from, to);
      }
    }
  }

 private:
  // The pixels of an axis whose padded coordinates have a remainder: the first one, its place in the
  // plane, and their number.
  struct Run {
    int64_t pixel, first, count;
  };

  std::vector<Run> row_runs, column_runs;

  ALWAYS_INLINE void fill_split_row(const float* x, float* to) {
    const Axis& columns = axes[1];
    if (columns.stride == 2) {  // even and odd pixels at once become vector instructions
      const int64_t odd_pad = columns.pad % 2, skipped = (columns.pad + 1) / 2;
      const int64_t pairs = std::min(columns.pixels / 2, plane.columns - skipped);
      float* RESTRICT even = to + odd_pad * plane.elements() + columns.pad / 2;
      float* RESTRICT odd = to + (1 - odd_pad) * plane.elements() + skipped;
      INDEPENDENT for (int64_t i = 0; i < pairs; ++i) {
        even[i] = x[2 * i];
        odd[i] = x[2 * i + 1];
      }
      const int64_t rest = std::max<int64_t>(pairs, 0);
      if (2 * rest < columns.pixels && rest + columns.pad / 2 < plane.columns) {
        even[rest] = x[2 * rest];
      }
      return;
    }
    for (int64_t j = 0; j < columns.stride; ++j, to += plane.elements()) {
      const Run& each = column_runs[j];
      for (int64_t i = 0; i < each.count; ++i) {
        to[each.first + i] = x[each.pixel + i * columns.stride];
      }
    }
  }

  static Run run(const Axis& axis, int64_t size, int64_t remainder) {
    const int64_t ahead = remainder - axis.pad % axis.stride;
    const int64_t pixel = ahead < 0 ? ahead + axis.stride : ahead;
    const int64_t first = (axis.pad + pixel) / axis.stride;
    const int64_t last = (axis.pixels + axis.pad - 1 - remainder + axis.stride) / axis.stride;
    return {pixel, first, std::min(size, last) - first};
  }
};

// The elements of dy, `ahead` elements behind the begin of a plane; 0 around them.
struct SmallFrame {
  Plane plane;
  std::array<int64_t, 2> ahead;
  std::vector<float> elements;

  SmallFrame(const Plane& p, const std::array<int64_t, 2>& a)
      : plane(p), ahead(a), elements(plane.elements() + ahead[0] * plane.columns + ahead[1] + LANES) {}

  ALWAYS_INLINE void fill(const Axes& axes, int64_t image, const float* dy) {
    const int64_t rows = std::min(axes[0].windows, plane.rows - ahead[0]);
    const int64_t columns = std::min(axes[1].windows, plane.columns - ahead[1]);
    float* to = elements.data() + plane.at(image, ahead[0]) + ahead[1];
    copy_rows(dy, axes[1].windows, to, plane.columns, rows, columns);
  }
};

// The place of one channel of an image of `size` elements.
int64_t place(const Work& work, int64_t image, int64_t channel, int64_t size) {
  return (image * work.channels + channel) * size;
}

float bias_of(const Work& work, int64_t channel) {
  return work.bias ? work.bias[channel] : 0.0f;
}

ALWAYS_INLINE void run_forward(const Work& work, int64_t task) {
  const auto& [rows, columns] = work.axes;
  const Part part = part_of(work, task);
  LargeFrame frame(work);
  const Plane& plane = frame.plane;
  const int64_t elements = round_up(plane.at(part.images(), 0), VECTOR);
  std::vector<float> sums(elements);
  for (int64_t channel = part.first_channel; channel < part.end_channel; ++channel) {
    for (int64_t i = 0; i < part.images(); ++i) {
      const int64_t image = part.first_image + i;
      frame.fill(i, work.x + place(work, image, channel, rows.pixels * columns.pixels));
    }
    const float* w = work.w + channel * rows.kernel * columns.kernel;
    Taps taps;
    for (int64_t i = 0; i < rows.kernel; ++i) {
      for (int64_t j = 0; j < columns.kernel; ++j) taps.add(frame.offset(i, j), *w++);
    }
    sum_shifted(frame.elements.data(), taps, bias_of(work, channel), sums.data(), elements);
    for (int64_t i = 0; i < part.images(); ++i) {
      const int64_t image = part.first_image + i;
      float* y = work.result + place(work, image, channel, rows.windows * columns.windows);
      const float* from = sums.data() + plane.at(i, 0);
      copy_rows(from, plane.columns, y, columns.windows, rows.windows, columns.windows);
    }
  }
}

// The taps that reach the pixels whose padded coordinates have these remainders.
ALWAYS_INLINE Taps taps_of_remainder(
    const Work& work, const SmallFrame& frame, int64_t channel, int64_t row_remainder,
    int64_t column_remainder) {
  const auto& [rows, columns] = work.axes;
  const float* w = work.w + channel * rows.kernel * columns.kernel;
  Taps taps;
  for (int64_t i = 0; i < rows.kernel; ++i) {
    for (int64_t j = 0; j < columns.kernel; ++j, ++w) {
      const int64_t row = i * rows.dilation, column = j * columns.dilation;
      if (row % rows.stride != row_remainder || column % columns.stride != column_remainder) continue;
      const int64_t rows_behind = frame.ahead[0] - row / rows.stride;
      taps.add(rows_behind * frame.plane.columns + frame.ahead[1] - column / columns.stride, *w);
    }
  }
  return taps;
}

ALWAYS_INLINE void run_transposed(const Work& work, int64_t task) {
  const auto& [rows, columns] = work.axes;
  const Part part = part_of(work, task);
  // rows and columns of each remainder, as far as there are pixels
  const int64_t rows_of_each = divide_up(rows.pixels + rows.pad, rows.stride);
  const int64_t columns_of_each = divide_up(columns.pixels + columns.pad, columns.stride);
  const int64_t row_reach = reach(rows), column_reach = reach(columns);
  SmallFrame frame(
      {work.images_per_task(), rows_of_each + row_reach, columns_of_each + column_reach},
      {row_reach, column_reach});
  const Plane& plane = frame.plane;
  const int64_t elements = round_up(plane.at(part.images(), 0), VECTOR);
  std::vector<float> sums(columns.stride * elements);
  for (int64_t channel = part.first_channel; channel < part.end_channel; ++channel) {
    for (int64_t n = 0; n < part.images(); ++n) {
      const int64_t image = part.first_image + n;
      frame.fill(work.axes, n, work.dy + place(work, image, channel, rows.windows * columns.windows));
    }
    for (int64_t i = 0; i < rows.stride; ++i) {
      for (int64_t j = 0; j < columns.stride; ++j) {
        const Taps taps = taps_of_remainder(work, frame, channel, i, j);
        float* to = sums.data() + j * elements;
        sum_shifted(frame.elements.data(), taps, bias_of(work, channel), to, elements);
      }
      // the rows of this remainder that have pixels
      const int64_t ahead = rows.pad - i;
      const int64_t begin = ahead > 0 ? divide_up(ahead, rows.stride) : 0;
      const int64_t count = divide_up(rows.pixels + ahead, rows.stride) - begin;
      const int64_t pitch = rows.stride * columns.pixels;
      for (int64_t n = 0; n < part.images(); ++n) {
        const float* from = sums.data() + plane.at(n, begin);
        const int64_t image = part.first_image + n;
        float* dx = work.result + place(work, image, channel, rows.pixels * columns.pixels) +
                    (begin * rows.stride - ahead) * columns.pixels;
        if (columns.stride == 1) {
          copy_rows(from + columns.pad, plane.columns, dx, pitch, count, columns.pixels);
          continue;
        }
        for (int64_t row = 0; row < count; ++row, from += plane.columns, dx += pitch) {
          interleave(from, elements, columns, dx);
        }
      }
    }
  }
}

ALWAYS_INLINE void run_weights(const Work& work, int64_t task) {
  const auto& [rows, columns] = work.axes;
  LargeFrame large(work);
  const Plane& plane = large.plane;
  SmallFrame small(plane, {0, 0});
  const int64_t count = rows.kernel * columns.kernel;
  int64_t offsets[MAX_TAPS];
  for (int64_t tap = 0; tap < count; ++tap) {
    offsets[tap] = large.offset(tap / columns.kernel, tap % columns.kernel);
  }
  const int64_t elements = round_up(plane.elements(), LANES);
  std::vector<double> totals(work.channels_per_task() * count);
  float sums[TAPS_AT_ONCE * LANES];
  for (int64_t group = 0; group < work.image_groups(); ++group) {
    const Part part = part_of(work, group * work.channel_groups() + task);
    double* total = totals.data();
    for (int64_t channel = part.first_channel; channel < part.end_channel; ++channel) {
      for (int64_t i = 0; i < part.images(); ++i) {
        const int64_t image = part.first_image + i;
        large.fill(i, work.x + place(work, image, channel, rows.pixels * columns.pixels));
        const int64_t from = place(work, image, channel, rows.windows * columns.windows);
        small.fill(work.axes, i, work.dy + from);
      }
      // images of the last group that are not there
      std::fill(small.elements.begin() + plane.at(part.images(), 0), small.elements.end(), 0.0f);
      for_taps(count, [&](int64_t tap, auto sequence) INLINE {
        std::fill(sums, sums + sequence.size() * LANES, 0.0f);
        add_products(
            large.elements.data(), offsets + tap, small.elements.data(), sums, elements, sequence);
        for (size_t i = 0; i < sequence.size(); ++i) {
          for (int64_t lane = 0; lane < LANES; ++lane) total[tap + i] += sums[i * LANES + lane];
        }
      });
      total += count;
    }
  }
  const Part part = part_of(work, task);
  float* result = work.result + part.first_channel * count;
  std::copy_n(totals.begin(), (part.end_channel - part.first_channel) * count, result);
}

}  // namespace

int64_t Work::images_per_task() const {
  int64_t elements = 1;
  for (const Axis& axis : axes) {
    const int64_t size = std::max(axis.windows, divide_up(axis.pixels + axis.pad, axis.stride));
    elements *= axis.stride * (size + reach(axis));
  }
  return std::max<int64_t>(1, std::min(images, FRAME_ELEMENTS / elements));
}

int64_t Work::channels_per_task() const {
  return std::clamp<int64_t>(channels / CHANNEL_GROUPS, 1, CHANNEL_GROUPS);
}

int64_t Work::channel_groups() const { return divide_up(channels, channels_per_task()); }

int64_t Work::image_groups() const { return divide_up(images, images_per_task()); }

void convolve(const Work& work, int64_t task) { vectorized<run_forward>(work, task); }

void convolve_transposed(const Work& work, int64_t task) {
  vectorized<run_transposed>(work, task);
}

void differentiate_weights(const Work& work, int64_t task) {
  vectorized<run_weights>(work, task);
}

}  // namespace depthwise

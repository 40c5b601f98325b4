#include <array>

#include "check.h"
#include "dense.h"
#include "depthwise.h"
#include "max_pool.h"

namespace {

using convolution::Axes;
using convolution::Axis;

// Call function(place of a pixel, of a window, of a tap) for each product in the convolution of a plane.
template <typename Function>
void for_each_product(const Axes& axes, const Function& function) {
  const auto& rows = axes[0];
  const auto& columns = axes[1];
  for (int64_t i = 0; i < rows.windows; ++i) {
    for (int64_t tap = 0; tap < rows.kernel * columns.kernel; ++tap) {
      const int64_t row = rows.stride * i + rows.dilation * (tap / columns.kernel) - rows.pad;
      for (int64_t j = 0; row >= 0 && row < rows.pixels && j < columns.windows; ++j) {
        const int64_t column =
            columns.stride * j + columns.dilation * (tap % columns.kernel) - columns.pad;
        if (column < 0 || column >= columns.pixels) continue;
        function(row * columns.pixels + column, i * columns.windows + j, tap);
      }
    }
  }
}

// The arrays of a convolution, and its three directions in double precision.
struct Convolution {
  Arrays<float> arrays;
  int64_t pixels, windows, taps;  // of a plane
  float *x, *dy, *w, *bias;
  std::vector<Sum> y, dx, dw;

  // `has_bfloat16`: the factors are rounded.
  Convolution(
      const Axes& axes, int64_t images, int64_t channels, int64_t filters, bool is_depthwise,
      bool has_bfloat16 = false) {
    const auto factor = [&](float number) { return has_bfloat16 ? nearest_bfloat16(number) : double(number); };
    pixels = axes[0].pixels * axes[1].pixels;
    windows = axes[0].windows * axes[1].windows;
    taps = axes[0].kernel * axes[1].kernel;
    const int64_t channels_of_filter = is_depthwise ? 1 : channels;
    x = arrays.make(images * channels * pixels);
    dy = arrays.make(images * filters * windows);
    w = arrays.make(filters * channels_of_filter * taps);
    bias = number_below(2) ? arrays.make(std::max(channels, filters)) : nullptr;
    y.resize(size_t(images * filters * windows));
    dx.resize(size_t(images * channels * pixels));
    dw.resize(size_t(filters * channels_of_filter * taps));
    add_bias(y, windows, filters);
    add_bias(dx, pixels, channels);
    for (int64_t image = 0; image < images; ++image) {
      for (int64_t filter = 0; filter < filters; ++filter) {
        for (int64_t i = 0; i < channels_of_filter; ++i) {
          const int64_t of_x = (image * channels + (is_depthwise ? filter : i)) * pixels;
          const int64_t of_y = (image * filters + filter) * windows;
          const int64_t of_w = (filter * channels_of_filter + i) * taps;
          for_each_product(axes, [&](int64_t pixel, int64_t window, int64_t tap) {
            const double from_x = factor(x[of_x + pixel]), from_dy = factor(dy[of_y + window]);
            const double weight = factor(w[of_w + tap]);
            y[size_t(of_y + window)] += from_x * weight;
            dx[size_t(of_x + pixel)] += from_dy * weight;
            dw[size_t(of_w + tap)] += from_x * from_dy;
          });
        }
      }
    }
  }

  // Winograd's algorithm adds and subtracts neighbouring pixels, so that all results have errors of the
  // size of the largest.
  static void spread_sizes(std::vector<Sum>& sums) {
    double largest = 0;
    for (const Sum& sum : sums) largest = std::max(largest, sum.size);
    for (Sum& sum : sums) sum.size = largest;
  }

 private:
  void add_bias(std::vector<Sum>& sums, int64_t size, int64_t planes) const {
    for (size_t i = 0; bias && i < sums.size(); ++i) sums[i] += double(bias[int64_t(i) / size % planes]);
  }
};

void convolve_depthwise(int trial) {
  depthwise::Work work{{}, 1 + number_below(6), 1 + number_below(40), {}, {}, {}, {}, {}};
  for (Axis& axis : work.axes) {
    axis = {1 + number_below(5), 1 + number_below(3), 1 + number_below(3), number_below(6),
            1 + number_below(trial % 8 == 0 ? 150 : 20), 1 + number_below(20)};
  }
  Convolution expected(work.axes, work.images, work.channels, work.channels, true);
  work.x = expected.x;
  work.w = expected.w;
  work.dy = expected.dy;
  work.bias = expected.bias;
  const auto run = [&](auto function, int64_t tasks, const char* what, const std::vector<Sum>& sums) {
    work.result = expected.arrays.make(int64_t(sums.size()));
    for (int64_t task = 0; task < tasks; ++task) function(work, task);
    require_sums(what, work.result, sums);
  };
  const int64_t channel_groups = work.channel_groups();
  run(depthwise::convolve, channel_groups * work.image_groups(), "depthwise y", expected.y);
  run(depthwise::convolve_transposed, channel_groups * work.image_groups(), "depthwise dx", expected.dx);
  run(depthwise::differentiate_weights, channel_groups, "depthwise dw", expected.dw);
}

void convolve_densely(int trial) {
  dense::Work work{{}, 1 + number_below(5), 1 + number_below(40), 1 + number_below(90),
                   {}, {}, {}, {}, {}};
  for (Axis& axis : work.axes) {
    axis = {1 + number_below(4), 1 + number_below(3), 1 + number_below(3), number_below(6),
            1 + number_below(trial % 8 == 0 ? 60 : 16), 1 + number_below(20)};
  }
  if (number_below(2)) {  // one that Winograd's algorithm computes
    const int64_t taps[3][2] = {{3, 3}, {1, 3}, {1, 5}};
    for (size_t i = 0; i < 2; ++i) {
      const int64_t kernel = taps[trial % 3][i];
      const Axis axis = work.axes[i];
      work.axes[i] = {kernel, 1, 1, number_below(kernel), axis.pixels, axis.windows};
    }
  }
  work.has_pairs = number_below(2);
  Convolution expected(work.axes, work.images, work.channels, work.filters, false, work.has_pairs);
  work.x = expected.x;
  work.w = expected.w;
  work.dy = expected.dy;
  work.bias = expected.bias;
  for (bool is_winograd : {false, true}) {
    if (is_winograd && !dense::has_winograd(work.axes)) continue;
    // Winograd's algorithm rounds sums of the factors, not the factors.
    const double of_size = is_winograd && work.has_pairs ? 0x1p-6 : OF_SIZE;
    const auto run = [&](dense::Direction direction, const char* what, std::vector<Sum>& sums) {
      if (is_winograd) Convolution::spread_sizes(sums);
      work.result = expected.arrays.make(int64_t(sums.size()));
      const auto algorithm = (is_winograd ? dense::winograd : dense::direct)(work, direction);
      const std::vector<int64_t> tasks = algorithm->tasks_of_stages();
      for (size_t stage = 0; stage < tasks.size(); ++stage) {
        for (int64_t task = tasks[stage]; task-- > 0;) algorithm->run(stage, task);
      }
      require_sums(what, work.result, sums, of_size);
    };
    const auto run_all = [&] {
      run(dense::Direction::FORWARD, "convolution y", expected.y);
      run(dense::Direction::TRANSPOSED, "convolution dx", expected.dx);
      run(dense::Direction::WEIGHTS, "convolution dw", expected.dw);
    };
    for (InstructionSet set : instruction_sets()) {
      work.instructions = set;
      work.pair_instructions = PairInstructions::NONE;
      run_all();
    }
    work.pair_instructions = pair_instructions();
    if (work.has_pairs && work.pair_instructions != PairInstructions::NONE) run_all();
  }
}

// Return the places of the elements in a window that are inside the image, in their order.
template <typename T>
std::vector<int64_t> elements_of_window(const max_pool::Work<T>& work, int64_t window) {
  std::vector<int64_t> places{0};
  for (size_t i = 0; i < max_pool::AXES; ++i) {
    const max_pool::Axis& axis = work.axes[i];
    int64_t windows_behind = 1;
    for (size_t j = i + 1; j < max_pool::AXES; ++j) windows_behind *= work.axes[j].windows;
    const int64_t first = window / windows_behind % axis.windows * axis.stride - axis.pad;
    std::vector<int64_t> more;
    for (int64_t place : places) {
      for (int64_t tap = 0; tap < axis.kernel; ++tap) {
        const int64_t here = first + tap * axis.dilation;
        if (here >= 0 && here < axis.size) more.push_back(place * axis.size + here);
      }
    }
    places = more;
  }
  return places;
}

template <typename T>
void pool(int trial) {
  max_pool::Work<T> work{{}, size_t(1 + number_below(4)), nullptr, nullptr, nullptr};
  const bool halves = trial % 4 == 0;
  for (size_t i = 0; i < max_pool::AXES; ++i) {
    max_pool::Axis& axis = work.axes[i];
    if ((i == 0 && trial % 2 == 0) || (i == 1 && trial % 8 == 4)) continue;
    axis.size = number_below(i == 2 && trial % 8 == 0 ? 300 : 12);
    if (halves) {
      axis = {2, 2, 1, 0, axis.size, axis.size / 2};
    } else {
      axis = {1 + number_below(4), 1 + number_below(4), 1 + number_below(3), number_below(4),
              axis.size, number_below(12)};
    }
  }
  const int64_t elements = int64_t(work.elements()), windows = int64_t(work.windows());
  Arrays<T> arrays;
  T* x = arrays.make(int64_t(work.images) * elements);
  for (int64_t i = 0; i < int64_t(work.images) * elements; ++i) {
    if (trial % 3 == 0 && number_below(8) == 0) x[i] = std::numeric_limits<T>::quiet_NaN();
    if (trial % 3 == 1) x[i] = std::round(x[i]);  // several maxima
  }
  const T* dy = arrays.make(int64_t(work.images) * windows);
  T* dx = arrays.make(int64_t(work.images) * elements);
  work.x = x;
  work.dy = dy;
  work.dx = dx;
  for (size_t task = 0; task < work.tasks(); ++task) max_pool::run(work, task);
  for (int64_t image = 0; image < int64_t(work.images); ++image, x += elements, dx += elements) {
    std::vector<double> expected(static_cast<size_t>(elements), 0.0);
    for (int64_t window = 0; window < windows; ++window, ++dy) {
      const std::vector<int64_t> places = elements_of_window(work, window);
      if (places.empty()) continue;
      int64_t best = -1;
      for (int64_t place : places) {
        if (x[place] == x[place] && (best < 0 || x[place] > x[best])) best = place;
      }
      expected[size_t(best < 0 ? places[0] : best)] += double(*dy);
    }
    for (int64_t i = 0; i < elements; ++i) {
      require_near("gradient of MaxPool", double(dx[i]), expected[size_t(i)], 1e-5);
    }
  }
}

}  // namespace

void test_depthwise(double share) {
  for (int trial = 0; trial < int(1000 * share); ++trial) convolve_depthwise(trial);
}

void test_dense(double share) {
  if (instruction_set() == InstructionSet::NONE) return;
  for (int trial = 0; trial < int(400 * share); ++trial) convolve_densely(trial);
}

void test_max_pool(double share) {
  for (int trial = 0; trial < int(3000 * share); ++trial) {
    pool<float>(trial);
    pool<double>(trial);
  }
}

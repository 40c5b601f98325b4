#include "batch_norm.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "vectorized.h"

namespace batch_norm {

namespace {

constexpr int64_t LANES = 64;
constexpr int64_t MAX_PENDING = 16 * LANES;  // elements in lanes of float32
// The square of a distance, in variances, within which a number is near enough to the mean.
constexpr double NEAR = 16;

// Call function(the activation, as a constant of the compiler).
template <typename Function>
ALWAYS_INLINE void with_activation(Activation activation, const Function& function) {
  switch (activation) {
    case NONE: return function(std::integral_constant<Activation, NONE>());
    case RELU: return function(std::integral_constant<Activation, RELU>());
    case RELU6: return function(std::integral_constant<Activation, RELU6>());
  }
}

// NaN stays NaN.
template <Activation ACTIVATION>
ALWAYS_INLINE float activate(float z) {
  if (ACTIVATION != NONE) z = z < 0 ? 0 : z;
  if (ACTIVATION == RELU6) z = z > 6 ? 6 : z;
  return z;
}

// Relu does not let the gradient pass at its kink, Clip does. Products become vector instructions.
template <Activation ACTIVATION>
ALWAYS_INLINE float masked(float dy, float z) {
  if (ACTIVATION == RELU) return dy * float(z > 0);
  if (ACTIVATION == RELU6) return dy * float(z >= 0) * float(z <= 6);
  return dy;
}

// Two sums over a channel.
struct Sums {
  float first[LANES] = {}, second[LANES] = {};
  int64_t pending = 0;
  double total_first = 0, total_second = 0;

  ALWAYS_INLINE void flush() {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      total_first += double(first[lane]);
      total_second += double(second[lane]);
      first[lane] = second[lane] = 0;
    }
    pending = 0;
  }

  // Add the pairs of numbers that `terms(i, sum, other sum)` adds, for i = 0, ..., n - 1.
  template <typename Terms>
  ALWAYS_INLINE void add(int64_t n, const Terms& terms) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
      add_block(i, LANES, terms);
      pending += LANES;
      if (pending >= MAX_PENDING) flush();
    }
    add_block(i, n - i, terms);
    pending += n - i;
    if (pending >= MAX_PENDING) flush();
  }

 private:
  template <typename Terms>
  ALWAYS_INLINE void add_block(int64_t begin, int64_t n, const Terms& terms) {
    INDEPENDENT for (int64_t lane = 0; lane < n; ++lane) {
      terms(begin + lane, first[lane], second[lane]);
    }
  }
};

// Call function(channel of the task, its first element) for each row of pixels of a task.
template <typename Function>
ALWAYS_INLINE void for_rows(const Work& work, int64_t first, int64_t end, const Function& function) {
  for (int64_t image = 0; image < work.images; ++image) {
    for (int64_t channel = first; channel < end; ++channel) {
      function(channel, (image * work.channels + channel) * work.pixels);
    }
  }
}

ALWAYS_INLINE void add_differences(
    const Work& work, const float* x, int64_t first, int64_t end, const float* shifts, Sums* sums) {
  for_rows(work, first, end, [&](int64_t channel, int64_t at) INLINE {
    const float* row = x + at;
    const float shift = shifts[channel - first];
    sums[channel - first].add(work.pixels, [=](int64_t i, float& sum, float& squares) INLINE {
      const float difference = row[i] - shift;
      sum += difference;
      squares += difference * difference;
    });
  });
}

ALWAYS_INLINE void scale_rows(const Forward& work, int64_t first, int64_t end) {
  with_activation(work.activation, [&](auto activation) INLINE {
    for_rows(work, first, end, [&](int64_t channel, int64_t at) INLINE {
      const float* x = work.x + at;
      float* RESTRICT y = work.y + at;
      const float mean = work.mean[channel], factor = work.factor[channel];
      const float bias = work.bias[channel];
      INDEPENDENT for (int64_t i = 0; i < work.pixels; ++i) {
        y[i] = activate<activation.value>((x[i] - mean) * factor + bias);
      }
    });
  });
}

ALWAYS_INLINE void add_products(const Gradient& work, int64_t first, int64_t end, Sums* sums) {
  with_activation(work.activation, [&](auto activation) INLINE {
    for_rows(work, first, end, [&](int64_t channel, int64_t at) INLINE {
      const float *x = work.x + at, *dy = work.dy + at;
      const float mean = work.mean[channel], factor = work.factor[channel];
      const float bias = activation.value == NONE ? 0 : work.bias[channel];
      sums[channel - first].add(work.pixels, [=](int64_t i, float& sum, float& products) INLINE {
        const float centred = x[i] - mean;
        const float dz = masked<decltype(activation)::value>(dy[i], centred * factor + bias);
        sum += dz;
        products += dz * centred;
      });
    });
  });
}

// dx = (dz - mean of dz - (x - mean) mean of dz (x - mean) / variance) factor
ALWAYS_INLINE void write_gradients(
    const Gradient& work, int64_t first, int64_t end, const float* means, const float* slopes) {
  with_activation(work.activation, [&](auto activation) INLINE {
    for_rows(work, first, end, [&](int64_t channel, int64_t at) INLINE {
      const float *x = work.x + at, *dy = work.dy + at;
      float* RESTRICT dx = work.dx + at;
      const float mean = work.mean[channel], factor = work.factor[channel];
      const float bias = activation.value == NONE ? 0 : work.bias[channel];
      const float mean_dz = means[channel - first], slope = slopes[channel - first];
      INDEPENDENT for (int64_t i = 0; i < work.pixels; ++i) {
        const float centred = x[i] - mean;
        const float dz = masked<activation.value>(dy[i], centred * factor + bias);
        dx[i] = (dz - mean_dz - centred * slope) * factor;
      }
    });
  });
}

}  // namespace

void normalize(const Forward& work, int64_t task) {
  const int64_t first = task * work.channels_per_task();
  const int64_t end = std::min(first + work.channels_per_task(), work.channels);
  const double count = double(work.images) * double(work.pixels);
  std::vector<float> shifts(end - first);
  for (int64_t channel = first; channel < end && count > 0; ++channel) {
    shifts[channel - first] = work.x[channel * work.pixels];
  }
  // The variance is the mean square of x - shift, minus the square of its mean (Chan, Golub and
  // LeVeque 1983). This is exact if the shift is near the mean; else the mean is the next shift.
  for (int trial = 0;; ++trial) {
    std::vector<Sums> sums(end - first);
    vectorized<add_differences>(work, work.x, first, end, shifts.data(), sums.data());
    bool is_near = true;
    for (int64_t i = 0; i < end - first; ++i) {
      sums[i].flush();
      const double mean = sums[i].total_first / count;
      const double variance = std::max(sums[i].total_second / count - mean * mean, 0.0);
      is_near = is_near && !(mean * mean > NEAR * variance);
      work.mean[first + i] = float(shifts[i] + mean);
      work.variance[first + i] = float(variance);
    }
    if (is_near || trial == 1) break;
    std::copy(work.mean + first, work.mean + end, shifts.begin());
  }
  for (int64_t channel = first; channel < end; ++channel) {
    work.deviation[channel] = std::sqrt(work.variance[channel] + work.epsilon);
    work.factor[channel] = work.scale[channel] / work.deviation[channel];
  }
  vectorized<scale_rows>(work, first, end);
}

void differentiate(const Gradient& work, int64_t task) {
  const int64_t first = task * work.channels_per_task();
  const int64_t end = std::min(first + work.channels_per_task(), work.channels);
  const double count = double(work.images) * double(work.pixels);
  std::vector<Sums> sums(end - first);
  vectorized<add_products>(work, first, end, sums.data());
  std::vector<float> means(end - first), slopes(end - first);
  for (int64_t i = 0; i < end - first; ++i) {
    sums[i].flush();
    const double deviation = work.deviation[first + i];
    work.sum[first + i] = float(sums[i].total_first);
    work.product_sum[first + i] = float(sums[i].total_second);
    means[i] = float(sums[i].total_first / count);
    slopes[i] = float(sums[i].total_second / count / (deviation * deviation));
  }
  vectorized<write_gradients>(work, first, end, means.data(), slopes.data());
}

}  // namespace batch_norm

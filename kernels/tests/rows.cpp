#include "batch_norm.h"
#include "check.h"
#include "column_sums.h"
#include "gather.h"
#include "layer_norm.h"
#include "softmax.h"

namespace {

double sum_of_squares(const std::vector<double>& numbers) {
  double sum = 0;
  for (double number : numbers) sum += number * number;
  return sum;
}

double sum_of(const std::vector<double>& numbers) {
  double sum = 0;
  for (double number : numbers) sum += number;
  return sum;
}

// The arrays of a BatchNormalization.
struct BatchNorm {
  batch_norm::Work sizes;
  Arrays<float> arrays;
  float *x, *dy;
  float *scale, *bias, *mean, *variance, *deviation, *factor, *sum, *product_sum;
  batch_norm::Forward forward;
  batch_norm::Gradient gradient;

  explicit BatchNorm(int trial)
      : sizes{1 + number_below(6), 1 + number_below(70), 1 + number_below(trial % 8 == 0 ? 3000 : 150),
              static_cast<batch_norm::Activation>(trial % 3)} {
    const int64_t elements = sizes.images * sizes.channels * sizes.pixels;
    x = arrays.make(elements);
    dy = arrays.make(elements);
    for (int64_t i = 0; trial % 5 == 0 && i < elements; ++i) x[i] += 100.0f;  // far from 0
    for (auto vector : {&scale, &bias, &mean, &variance, &deviation, &factor, &sum, &product_sum}) {
      *vector = arrays.make(sizes.channels);
    }
    forward = {sizes, x, scale, bias, 1e-5f, arrays.make(elements), mean, variance, deviation, factor};
    gradient = {sizes, x, dy, mean, deviation, factor, sizes.activation ? bias : nullptr,
                arrays.make(elements), sum, product_sum};
  }

  // Return the place of a pixel of a channel.
  int64_t place(int64_t channel, int64_t i) const {
    return (i / sizes.pixels * sizes.channels + channel) * sizes.pixels + i % sizes.pixels;
  }
  int64_t count() const { return sizes.images * sizes.pixels; }

  void check_forward(int64_t channel) const {
    std::vector<double> differences;
    for (int64_t i = 0; i < count(); ++i) differences.push_back(double(x[place(channel, i)]));
    const double expected_mean = sum_of(differences) / double(count());
    for (double& number : differences) number -= expected_mean;
    const double expected_variance = sum_of_squares(differences) / double(count());
    const double expected_deviation = std::sqrt(expected_variance + double(forward.epsilon));
    const double expected_factor = double(scale[channel]) / expected_deviation;
    const double of_mean = 1e-6 * (std::abs(expected_mean) + std::sqrt(expected_variance));
    require_near("mean", double(mean[channel]), expected_mean, of_mean);
    require_near("variance", double(variance[channel]), expected_variance, 3e-6 * expected_variance);
    require_near("deviation", double(deviation[channel]), expected_deviation, 3e-6 * expected_deviation);
    require_near("factor", double(factor[channel]), expected_factor, 3e-6 * std::abs(expected_factor));
    for (int64_t i = 0; i < count(); ++i) {
      const double product = differences[size_t(i)] * expected_factor, z = product + double(bias[channel]);
      const double low = sizes.activation ? std::max(z, 0.0) : z;
      const double y = sizes.activation == batch_norm::RELU6 ? std::min(low, 6.0) : low;
      const double error = of_mean * std::abs(expected_factor) + 5e-6 * (std::abs(product) + std::abs(z));
      require_near("batch norm", double(forward.y[place(channel, i)]), y, error);
    }
  }

  void check_gradient(int64_t channel) const {
    Sum of_dz, of_products;
    std::vector<double> dz, centred;
    for (int64_t i = 0; i < count(); ++i) {
      // In float, so that the kinks are at the same numbers.
      const float distance = x[place(channel, i)] - mean[channel];
      const float z = distance * factor[channel] + bias[channel];
      const bool passes = sizes.activation == batch_norm::NONE ||
                          (sizes.activation == batch_norm::RELU ? z > 0 : z >= 0 && z <= 6);
      centred.push_back(double(distance));
      dz.push_back(passes ? double(dy[place(channel, i)]) : 0.0);
      of_dz += dz.back();
      of_products += dz.back() * centred.back();
    }
    require_near("sum of dz", double(sum[channel]), of_dz.value, 1e-6 * of_dz.size);
    require_near("sum of products", double(product_sum[channel]), of_products.value, 1e-6 * of_products.size);
    const double square = double(deviation[channel]) * double(deviation[channel]);
    const double slope = of_products.value / double(count()) / square;
    for (int64_t i = 0; i < count(); ++i) {
      Sum dx;
      dx += dz[size_t(i)];
      dx += -of_dz.value / double(count());
      dx += -centred[size_t(i)] * slope;
      const double size = dx.size + of_dz.size / double(count()) +
                          std::abs(centred[size_t(i)]) * of_products.size / double(count()) / square;
      require_near("gradient of batch norm", double(gradient.dx[place(channel, i)]),
                   dx.value * double(factor[channel]), 1e-6 * size * std::abs(double(factor[channel])));
    }
  }
};

struct LayerNorm {
  int64_t rows, columns;
  Arrays<float> arrays;
  float *x, *dy, *scale, *bias, *mean, *inverse;

  LayerNorm(int64_t r, int64_t c) : rows(r), columns(c) {
    for (auto matrix : {&x, &dy}) *matrix = arrays.make(rows * columns);
    for (auto vector : {&scale, &bias}) *vector = arrays.make(columns);
    for (auto vector : {&mean, &inverse}) *vector = arrays.make(rows);
  }

  void check_forward(bool has_bias, bool has_statistics) {
    const layer_norm::Forward forward{
        {rows, columns}, x, scale, has_bias ? bias : nullptr, 1e-5f, arrays.make(rows * columns),
        has_statistics ? mean : nullptr, has_statistics ? inverse : nullptr};
    for (int64_t task = 0; task < forward.tasks(); ++task) layer_norm::normalize(forward, task);
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<double> differences(x + row * columns, x + (row + 1) * columns);
      const double expected_mean = sum_of(differences) / double(columns);
      for (double& number : differences) number -= expected_mean;
      const double variance = sum_of_squares(differences) / double(columns);
      const double expected_inverse = 1 / std::sqrt(variance + double(forward.epsilon));
      // One number alone is its mean: its difference is nothing but an error.
      const double of_inverse = (columns == 1 ? 1e-3 : 5e-6) * expected_inverse;
      if (has_statistics) {
        require_near("mean", double(mean[row]), expected_mean, 2e-6);
        require_near("inverse", double(inverse[row]), expected_inverse, of_inverse);
      }
      for (int64_t i = 0; i < columns; ++i) {
        const double y = differences[size_t(i)] * expected_inverse * double(scale[i]);
        const double error = std::abs(double(scale[i])) * 2e-6 * expected_inverse + 1e-5 * std::abs(y);
        require_near("layer norm", double(forward.y[row * columns + i]),
                     y + (has_bias ? double(bias[i]) : 0.0), error + 1e-6);
      }
    }
  }

  // The statistics are random: those of x need not be right.
  void check_gradient(bool has_parts) {
    layer_norm::Gradient gradient{{rows, columns}, x, dy, scale, mean, inverse, arrays.make(rows * columns), nullptr};
    if (has_parts) {
      const int64_t size = gradient.tasks() * 2 * columns;
      gradient.parts = arrays.make(size);
      std::fill_n(gradient.parts, size, 0.0f);
    }
    for (int64_t task = 0; task < gradient.tasks(); ++task) layer_norm::differentiate(gradient, task);
    std::vector<Sum> dscale(static_cast<size_t>(columns)), dbias(static_cast<size_t>(columns));
    for (int64_t row = 0; row < rows; ++row) {
      Sum of_dn, of_products;
      const double of_row = double(inverse[row]);
      const auto centred = [&](int64_t i) { return double(x[row * columns + i]) - double(mean[row]); };
      const auto dn = [&](int64_t i) { return double(dy[row * columns + i]) * double(scale[i]); };
      for (int64_t i = 0; i < columns; ++i) {
        of_dn += dn(i);
        of_products += dn(i) * centred(i);
        dscale[size_t(i)] += double(dy[row * columns + i]) * centred(i) * of_row;
        dbias[size_t(i)] += double(dy[row * columns + i]);
      }
      for (int64_t i = 0; i < columns; ++i) {
        const double n = double(columns), slope = of_row * of_row / n;
        const double dx = dn(i) - of_dn.value / n - centred(i) * slope * of_products.value;
        const double size = std::abs(dn(i)) + of_dn.size / n + std::abs(centred(i)) * slope * of_products.size;
        const double error = OF_SIZE * (size + slope * of_products.size) * std::abs(of_row);
        require_near("gradient of layer norm", double(gradient.dx[row * columns + i]), dx * of_row, error);
      }
    }
    if (!has_parts) return;
    float *results = arrays.make(columns), *more = arrays.make(columns);
    layer_norm::add_parts(gradient, results, more);
    for (Sum& sum : dscale) sum.size += double(rows) * 0.1;  // x - mean is rounded, too
    require_sums("dscale", results, dscale);
    require_sums("dbias", more, dbias);
  }
};

void check_softmax(int64_t rows, int64_t columns, bool is_masked) {
  Arrays<float> arrays;
  float *x = arrays.make(rows * columns), *dy = arrays.make(rows * columns);
  for (int64_t i = 0; is_masked && i < rows * columns; ++i) {
    const bool is_row = i / columns % 3 == 0;  // that is masked as a whole
    if (is_row || number_below(4) == 0) x[i] = -std::numeric_limits<float>::infinity();
  }
  const softmax::Masked forward{{rows, columns}, x, arrays.make(rows * columns)};
  for (int64_t task = 0; task < forward.tasks(); ++task) softmax::compute(forward, task);
  const softmax::Gradient gradient{{rows, columns}, forward.y, dy, arrays.make(rows * columns), is_masked};
  for (int64_t task = 0; task < gradient.tasks(); ++task) softmax::differentiate(gradient, task);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * columns;
    const double most = double(*std::max_element(x + at, x + at + columns));
    double sum = 0;
    Sum of_products;
    for (int64_t i = at; i < at + columns; ++i) {
      sum += std::exp(double(x[i]) - most);
      of_products += double(forward.y[i]) * double(dy[i]);
    }
    for (int64_t i = at; i < at + columns; ++i) {
      const double y = std::isinf(most) ? 0 : std::exp(double(x[i]) - most) / sum;
      require_near("softmax", double(forward.y[i]), y, 2e-6 * y);
      const double dx = double(forward.y[i]) * (double(dy[i]) - of_products.value);
      const double size = double(forward.y[i]) * (std::abs(double(dy[i])) + of_products.size);
      if (std::isinf(most)) require(std::isnan(gradient.dx[i]), "gradient of a masked row");
      else require_near("gradient of softmax", double(gradient.dx[i]), dx, OF_SIZE * size);
    }
  }
}

void check_column_sums(int64_t rows, int64_t columns) {
  Arrays<float> arrays;
  column_sums::Work work{rows, columns, arrays.make(rows * columns), nullptr};
  work.parts = arrays.make(work.row_parts() * columns);
  for (int64_t task = work.tasks(); task--;) column_sums::add_rows(work, task);
  float* results = arrays.make(columns);
  column_sums::add_parts(work, results);
  std::vector<Sum> sums(static_cast<size_t>(columns));
  for (int64_t i = 0; i < rows * columns; ++i) sums[size_t(i % columns)] += double(work.x[i]);
  require_sums("sums of columns", results, sums);
}

template <typename Index>
void gather_rows(int trial) {
  gather::Gradient<Index> work{};
  work.rows = number_below(trial % 8 ? 100 : 5000);
  work.columns = number_below(40);
  work.count = work.rows ? number_below(300) : 0;
  std::vector<Index> indices(static_cast<size_t>(work.count));
  for (Index& index : indices) index = Index(number_below(2 * work.rows) - work.rows);
  Arrays<float> arrays;
  work.indices = indices.data();
  work.dy = arrays.make(work.count * work.columns);
  work.table = trial % 3 ? arrays.make(work.rows * work.columns) : nullptr;
  work.factors = trial % 2 ? arrays.make(work.count) : nullptr;
  work.result = arrays.make(work.rows * work.columns);
  require(gather::are_in_range(work), "indices are in their range");
  for (int64_t task = work.tasks(); task--;) gather::differentiate(work, task);
  if (!work.table && !work.factors) {
    const gather::Rows rows(work);
    for (int64_t i = 0; i < work.rows * work.columns; ++i) {
      const float* row = rows[i / work.columns];
      require(work.result[i] == (row ? row[i % work.columns] : 0.0f), "rows of a gradient");
    }
  }
  std::vector<Sum> sums(static_cast<size_t>(work.rows * work.columns));
  for (size_t i = 0; work.table && i < sums.size(); ++i) sums[i] += double(work.table[i]);
  for (int64_t i = 0; i < work.count; ++i) {
    const int64_t index = indices[size_t(i)], row = index < 0 ? index + work.rows : index;
    const double factor = work.factors ? double(work.factors[i]) : 1;
    for (int64_t j = 0; j < work.columns; ++j) {
      const double term = factor * double(work.dy[i * work.columns + j]);
      sums[size_t(row * work.columns + j)] += work.table ? -term : term;
    }
  }
  require_sums("gradient of Gather", work.result, sums);
}

}  // namespace

void test_batch_norm(double share) {
  for (int trial = 0; trial < int(500 * share); ++trial) {
    const BatchNorm norm(trial);
    for (int64_t task = 0; task < norm.sizes.tasks(); ++task) batch_norm::normalize(norm.forward, task);
    for (int64_t task = 0; task < norm.sizes.tasks(); ++task) batch_norm::differentiate(norm.gradient, task);
    for (int64_t channel = 0; channel < norm.sizes.channels; ++channel) {
      norm.check_forward(channel);
      norm.check_gradient(channel);
    }
  }
}

void test_rows(double share) {
  for (int trial = 0; trial < int(1000 * share); ++trial) {
    const int64_t rows = number_below(trial % 8 == 0 ? 700 : 40);
    const int64_t columns = 1 + number_below(trial % 8 == 1 ? 3000 : 130);
    LayerNorm norm(rows, columns);
    norm.check_gradient(trial % 3);
    norm.check_forward(trial % 2, trial % 3);
    check_softmax(rows, columns, trial % 2);
    check_column_sums(rows, columns);
  }
}

void test_gather(double share) {
  for (int trial = 0; trial < int(1000 * share); ++trial) {
    gather_rows<int32_t>(trial);
    gather_rows<int64_t>(trial);
  }
}

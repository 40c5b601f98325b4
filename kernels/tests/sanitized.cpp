// Runs every kernel on arrays of exactly the size that it may touch, for the sanitizers to watch.
// Results are compared with the plain operators in tests/runtime/kernels, not here.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <algorithm>
#include <random>
#include <vector>

#include "batch_norm.h"
#include "dense.h"
#include "depthwise.h"
#include "elementwise.h"
#include "gather.h"
#include "layer_norm.h"
#include "low_rank.h"
#include "max_pool.h"
#include "packed.h"
#include "product.h"
#include "scan.h"
#include "softmax.h"

namespace {

std::mt19937 generator(0);

int64_t number_below(int64_t bound) {
  return std::uniform_int_distribution<int64_t>(0, bound - 1)(generator);
}

template <typename T>
std::unique_ptr<T[]> random_array(size_t n) {
  std::unique_ptr<T[]> array(new T[n]);
  for (size_t i = 0; i < n; ++i) array[i] = std::normal_distribution<T>()(generator);
  return array;
}

// A program of random numbers; most are refused.
elementwise::Program random_program() {
  elementwise::Program program{2, 3, 2, 2, {}};
  std::vector<int64_t> numbers;
  const int64_t instructions = 2 + number_below(5);
  for (int64_t i = 0; i < instructions; ++i) {
    const int64_t code = number_below(elementwise::CODES);
    numbers.push_back(code);
    numbers.push_back(3 + number_below(5) - (number_below(50) == 0 ? 5 : 0));
    for (size_t j = 0; j < elementwise::signature(code).operands(); ++j) {
      const char kind = elementwise::signature(code).text[j];
      numbers.push_back(kind == 's' ? 2 : number_below(7));
    }
  }
  if (!elementwise::read(numbers, program.instructions)) std::abort();
  numbers.resize(number_below(static_cast<int64_t>(numbers.size())));
  std::vector<elementwise::Instruction> cut;
  elementwise::read(numbers, cut);  // must not read beyond the end
  return program;
}

template <typename T>
int run_elementwise() {
  int run = 0;
  for (size_t n : {1, 2, 511, 512, 513, 8191, 8192, 8193, 20001}) {
    for (int trial = 0; trial < 5000; ++trial) {
      const elementwise::Program program = random_program();
      if (program.problem()) continue;
      std::vector<std::unique_ptr<T[]>> arrays;
      elementwise::Work<T> work{&program, n, {}, {}};
      const bool has_pieces = trial % 2;
      for (size_t i = 0; i < program.inputs; ++i) {
        if (has_pieces && i + 1 == program.tensors) {
          for (size_t end = 0; end < n;) {
            const size_t size = std::min(n - end, size_t(number_below(trial % 4 == 1 ? 3000 : 50)));
            arrays.push_back(random_array<T>(size));
            work.pieces.push_back({arrays.back().get(), end += size});
          }
          work.inputs.push_back(nullptr);
          continue;
        }
        arrays.push_back(random_array<T>(program.is_scalar(i) ? 1 : n));
        work.inputs.push_back(arrays.back().get());
      }
      for (size_t i = 0; i < program.outputs; ++i) {
        arrays.push_back(random_array<T>(n));
        work.outputs.push_back(arrays.back().get());
      }
      for (size_t task = 0; task < work.tasks(); ++task) elementwise::run(work, task);
      ++run;
    }
  }
  return run;
}

template <typename T>
int run_pools() {
  constexpr int trials = 3000;
  for (int trial = 0; trial < trials; ++trial) {
    max_pool::Work<T> work{{}, static_cast<size_t>(1 + number_below(4)), nullptr, nullptr, nullptr};
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
    const auto x = random_array<T>(work.images * work.elements());
    const auto dy = random_array<T>(work.images * work.windows());
    const auto dx = random_array<T>(work.images * work.elements());
    if (work.elements() && trial % 3 == 0) x[0] = std::numeric_limits<T>::quiet_NaN();
    work.x = x.get();
    work.dy = dy.get();
    work.dx = dx.get();
    for (size_t task = 0; task < work.tasks(); ++task) max_pool::run(work, task);
  }
  return trials;
}

int run_convolutions() {
  constexpr int trials = 3000;
  for (int trial = 0; trial < trials; ++trial) {
    depthwise::Work work{{}, 1 + number_below(6), 1 + number_below(40), {}, {}, {}, {}, {}};
    for (convolution::Axis& axis : work.axes) {
      axis = {1 + number_below(5), 1 + number_below(3), 1 + number_below(3), number_below(6),
              1 + number_below(trial % 8 == 0 ? 150 : 20), 1 + number_below(20)};
    }
    const auto& [rows, columns] = work.axes;
    const int64_t planes = work.images * work.channels;
    const int64_t taps = work.channels * rows.kernel * columns.kernel;
    const auto x = random_array<float>(planes * rows.pixels * columns.pixels);
    const auto dy = random_array<float>(planes * rows.windows * columns.windows);
    const auto w = random_array<float>(taps), bias = random_array<float>(work.channels);
    work.w = w.get();
    work.bias = trial % 2 ? bias.get() : nullptr;
    const int64_t tasks = work.channel_groups() * work.image_groups();
    work.x = x.get();
    work.result = dy.get();
    for (int64_t task = 0; task < tasks; ++task) depthwise::convolve(work, task);
    work.dy = dy.get();
    work.result = w.get();
    for (int64_t task = 0; task < work.channel_groups(); ++task) {
      depthwise::differentiate_weights(work, task);
    }
    work.result = x.get();
    for (int64_t task = 0; task < tasks; ++task) depthwise::convolve_transposed(work, task);
  }
  return trials;
}

// All instruction sets that this processor has, and both algorithms, whose results are the same but
// for rounding.
int run_dense_convolutions() {
  constexpr int trials = 600;
  const InstructionSet newest = instruction_set();
  if (newest == InstructionSet::NONE) return 0;
  for (int trial = 0; trial < trials; ++trial) {
    dense::Work work{{}, 1 + number_below(5), 1 + number_below(40), 1 + number_below(90),
                     {}, {}, {}, {}, {}};
    for (convolution::Axis& axis : work.axes) {
      axis = {1 + number_below(4), 1 + number_below(3), 1 + number_below(3), number_below(6),
              1 + number_below(trial % 8 == 0 ? 60 : 16), 1 + number_below(20)};
    }
    if (number_below(2)) {  // one that Winograd's algorithm computes
      const int64_t taps[3][2] = {{3, 3}, {1, 3}, {1, 5}};
      for (size_t i = 0; i < 2; ++i) {
        const int64_t kernel = taps[trial % 3][i];
        const convolution::Axis axis = work.axes[i];
        work.axes[i] = {kernel, 1, 1, number_below(kernel), axis.pixels, axis.windows};
      }
    }
    const auto& [rows, columns] = work.axes;
    const int64_t pixels = work.images * work.channels * rows.pixels * columns.pixels;
    const int64_t windows = work.images * work.filters * rows.windows * columns.windows;
    const int64_t weights = work.filters * work.channels * work.taps();
    const auto x = random_array<float>(pixels), dy = random_array<float>(windows);
    const auto w = random_array<float>(weights);
    const auto bias = random_array<float>(std::max(work.channels, work.filters));
    work.x = x.get();
    work.dy = dy.get();
    work.w = w.get();
    work.bias = trial % 2 ? bias.get() : nullptr;
    std::vector<std::vector<float>> results;
    for (InstructionSet set : {InstructionSet::AVX2, newest}) {
      work.instructions = set;
      std::unique_ptr<float[]> y(new float[windows]), dx(new float[pixels]), dw(new float[weights]);
      const bool has_winograd = dense::has_winograd(work.axes);
      for (bool is_winograd : {false, true}) {
        if (is_winograd && !has_winograd) continue;
        const auto run = [&](dense::Direction direction, float* result) {
          work.result = result;
          const auto algorithm = (is_winograd ? dense::winograd : dense::direct)(work, direction);
          const std::vector<int64_t> tasks = algorithm->tasks_of_stages();
          for (size_t stage = 0; stage < tasks.size(); ++stage) {
            for (int64_t task = tasks[stage]; task-- > 0;) algorithm->run(stage, task);
          }
        };
        run(dense::Direction::FORWARD, y.get());
        run(dense::Direction::TRANSPOSED, dx.get());
        run(dense::Direction::WEIGHTS, dw.get());
        std::vector<float> all(y.get(), y.get() + windows);
        all.insert(all.end(), dx.get(), dx.get() + pixels);
        all.insert(all.end(), dw.get(), dw.get() + weights);
        results.push_back(all);
      }
    }
    for (const std::vector<float>& result : results) {
      for (size_t i = 0; i < result.size(); ++i) {
        if (!(std::abs(result[i] - results[0][i]) <= 1e-3f)) std::abort();
      }
    }
  }
  return trials;
}

int run_batch_norms() {
  constexpr int trials = 1000;
  for (int trial = 0; trial < trials; ++trial) {
    const auto activation = static_cast<batch_norm::Activation>(trial % 3);
    const batch_norm::Work sizes{1 + number_below(6), 1 + number_below(70),
                                 1 + number_below(trial % 8 == 0 ? 3000 : 150), activation};
    const size_t elements = size_t(sizes.images * sizes.channels * sizes.pixels);
    const auto x = random_array<float>(elements), y = random_array<float>(elements);
    std::unique_ptr<float[]> vectors[8];
    for (auto& vector : vectors) vector = random_array<float>(size_t(sizes.channels));
    const auto& [scale, bias, mean, variance, deviation, factor, sum, product_sum] = vectors;
    const batch_norm::Forward forward{sizes, x.get(), scale.get(), bias.get(), 1e-5f, y.get(),
                                      mean.get(), variance.get(), deviation.get(), factor.get()};
    const auto dx = random_array<float>(elements);
    const batch_norm::Gradient gradient{
        sizes, x.get(), y.get(), mean.get(), deviation.get(), factor.get(),
        activation ? bias.get() : nullptr, dx.get(), sum.get(), product_sum.get()};
    for (int64_t task = 0; task < sizes.tasks(); ++task) batch_norm::normalize(forward, task);
    for (int64_t task = 0; task < sizes.tasks(); ++task) batch_norm::differentiate(gradient, task);
  }
  return trials;
}

int run_rows() {
  constexpr int trials = 1000;
  for (int trial = 0; trial < trials; ++trial) {
    const int64_t rows = number_below(trial % 8 == 0 ? 700 : 40);
    const int64_t columns = 1 + number_below(trial % 8 == 1 ? 3000 : 130);
    const auto x = random_array<float>(rows * columns), dy = random_array<float>(rows * columns);
    const auto dx = random_array<float>(rows * columns);
    const auto mean = random_array<float>(rows), inverse = random_array<float>(rows);
    const auto scale = random_array<float>(columns), dscale = random_array<float>(columns);
    const auto dbias = random_array<float>(columns);
    const layer_norm::Forward forward{
        {rows, columns}, x.get(), scale.get(), trial % 2 ? dbias.get() : nullptr, 1e-5f, dx.get(),
        trial % 3 ? mean.get() : nullptr, trial % 3 ? inverse.get() : nullptr};
    for (int64_t task = 0; task < forward.tasks(); ++task) layer_norm::normalize(forward, task);
    layer_norm::Gradient norm{{rows, columns}, x.get(), dy.get(), scale.get(), mean.get(),
                              inverse.get(), dx.get(), nullptr};
    const auto parts = random_array<float>(norm.tasks() * 2 * columns);
    if (trial % 3) norm.parts = parts.get();
    for (int64_t task = 0; task < norm.tasks(); ++task) layer_norm::differentiate(norm, task);
    if (norm.parts) layer_norm::add_parts(norm, dscale.get(), dbias.get());
    const softmax::Masked masked{{rows, columns}, x.get(), dx.get()};
    for (int64_t task = 0; task < masked.tasks(); ++task) softmax::compute(masked, task);
    const softmax::Gradient gradient{{rows, columns}, x.get(), dy.get(), dx.get(), trial % 2 == 0};
    for (int64_t task = 0; task < gradient.tasks(); ++task) softmax::differentiate(gradient, task);
  }
  return trials;
}

// A place of so many columns in a random buffer. Some places do not exist.
scan::Place random_place(const scan::Program& program, int64_t columns) {
  const int64_t buffer = number_below(int64_t(program.columns.size()));
  const int64_t beyond = number_below(20) == 0 ? 2 : 0;
  const int64_t last = program.columns[buffer] - columns + beyond;
  return {buffer - (number_below(40) == 0), last > 0 ? number_below(last + 1) : 0};
}

// A program of random instructions; most are refused.
scan::Program random_scan() {
  scan::Program program{1 + number_below(2), 1 + number_below(2), 1, 1, 0, number_below(3), {}, {}, {}, false};
  program.inputs = program.states + program.slices + 3;
  const int64_t temporaries = 1 + number_below(3);
  const int64_t columns = 1 + number_below(40);
  for (int64_t i = 0; i < program.inputs + program.outputs + temporaries; ++i) {
    program.columns.push_back(number_below(3) ? columns : 2 * columns);
  }
  program.columns[program.inputs - 1] = 1;  // the scalar
  const int64_t instructions = 2 + number_below(4);
  std::vector<int64_t> numbers;
  const auto write = [&](scan::Place place) {
    numbers.push_back(place.buffer);
    numbers.push_back(place.column);
  };
  for (int64_t i = 0; i < instructions; ++i) {
    const int64_t code = number_below(scan::PRODUCT + 1);
    const int64_t result = program.inputs + number_below(program.outputs + temporaries);
    const int64_t n = number_below(4) ? program.columns[result] : columns;
    numbers.push_back(code);
    numbers.push_back(n);
    write({result, number_below(4) || n == program.columns[result] ? 0 : n});
    scan::Instruction instruction{code, n, {}, {}};
    for (size_t j = 0; j < instruction.count(); ++j) {
      scan::Place place = random_place(program, n);
      if (code == scan::PRODUCT && j == 1) place = {program.states + program.slices, 0};
      if (code == scan::PRODUCT && j == 2 && number_below(2)) place = {scan::NOTHING, 0};
      write(place);
    }
  }
  if (!scan::read(numbers, program.instructions)) std::abort();
  numbers.resize(number_below(static_cast<int64_t>(numbers.size())));
  std::vector<scan::Instruction> cut;
  scan::read(numbers, cut);  // must not read beyond the end
  for (int64_t i = 0; i < program.states; ++i) {
    program.next.push_back(random_place(program, program.columns[i]));
  }
  program.is_reverse = number_below(2);
  return program;
}

template <typename Index>
int run_gathers() {
  for (int trial = 0; trial < 1000; ++trial) {
    gather::Gradient<Index> work{};
    work.rows = number_below(trial % 8 ? 100 : 5000);
    work.columns = number_below(40);
    work.count = work.rows ? number_below(300) : 0;
    std::vector<Index> indices(size_t(work.count));
    for (Index& index : indices) index = Index(number_below(2 * work.rows) - work.rows);
    work.indices = indices.data();
    const auto dy = random_array<float>(size_t(work.count * work.columns));
    const auto table = random_array<float>(size_t(work.rows * work.columns));
    const auto result = random_array<float>(size_t(work.rows * work.columns));
    work.dy = dy.get();
    work.table = trial % 3 ? table.get() : nullptr;
    const auto factors = random_array<float>(size_t(work.count));
    work.factors = trial % 2 ? factors.get() : nullptr;
    work.result = result.get();
    if (!gather::are_in_range(work)) std::abort();
    for (int64_t task = work.tasks(); task--;) gather::differentiate(work, task);
  }
  return 1000;
}

int run_low_ranks() {
  const InstructionSet newest = instruction_set();
  if (newest == InstructionSet::NONE) return 0;
  for (int trial = 0; trial < 400; ++trial) {
    low_rank::Gradient work{};
    work.rows = number_below(trial % 8 ? 100 : 3000);
    work.rank = 1 + number_below(low_rank::MAX_RANK);
    work.instructions = trial % 2 ? InstructionSet::AVX2 : newest;
    std::vector<std::unique_ptr<float[]>> arrays;
    const auto make = [&](int64_t elements) {
      arrays.push_back(random_array<float>(size_t(elements)));
      return arrays.back().get();
    };
    for (low_rank::Factor& factor : work.factors) {
      const int64_t columns = low_rank::COLUMNS * (1 + number_below(9));
      factor = {make(work.rows * columns), columns, make(work.padded_rank() * columns)};
    }
    work.parts = make(work.tasks() * work.part());
    for (int64_t task = 0; task < work.tasks(); ++task) low_rank::differentiate(work, task);
    float* da = make(work.rank * work.factors[0].columns);
    low_rank::add_parts(work, da, make(work.rank * work.factors[1].columns));
  }
  return 400;
}

// Matrices of random strides, in arrays that end with their last element.
int run_products() {
  const InstructionSet newest = instruction_set();
  if (newest == InstructionSet::NONE) return 0;
  constexpr int trials = 1500;
  for (int trial = 0; trial < trials; ++trial) {
    const auto size = [trial](int64_t most) { return 1 + number_below(trial % 7 ? 40 : most); };
    product::Work work{};
    work.sizes = {{1 + number_below(3), 1, 1 + number_below(3)}, size(450), size(300), size(300)};
    work.alpha = 0.5f;
    work.has_relu = trial % 4 == 0;
    work.instructions = trial % 2 ? InstructionSet::AVX2 : newest;
    const auto& [batch, rows, columns, steps] = work.sizes;
    std::vector<std::unique_ptr<float[]>> arrays;
    // The axes in a random order; some are repeated, except those of the result.
    const auto make = [&](auto& matrix, int64_t height, int64_t width, int kind) {
      const std::array<int64_t, 5> sizes{batch[0], batch[1], batch[2], height, width};
      std::array<size_t, 5> order{0, 1, 2, 3, 4};
      std::shuffle(order.begin(), order.end() - (kind == 0 ? 0 : 1), generator);
      std::array<int64_t, 5> strides{};
      const int64_t offset = kind == 2 ? 0 : number_below(3);
      int64_t elements = 1;
      for (size_t i = order.size(); i-- > 0;) {
        if (kind != 2 && order[i] != 4 && number_below(5) == 0) continue;
        strides[order[i]] = elements;
        elements *= sizes[order[i]];
      }
      arrays.push_back(random_array<float>(size_t(offset + elements)));
      matrix = {arrays.back().get(), {offset, {strides[0], strides[1], strides[2]}, strides[3], strides[4]}};
    };
    make(work.a, rows, steps, 0);
    make(work.b, steps, columns, 0);
    make(work.y, rows, columns, 2);
    work.addends = size_t(number_below(3));
    for (size_t i = 0; i < work.addends; ++i) make(work.addend[i], rows, columns, 1);
    work.parts = product::fastest_parts(work);
    for (int64_t task = 0; task < work.tasks(); ++task) product::multiply(work, task);
  }
  return trials;
}

int run_scans() {
  using Kind = scan::Program::Kind;
  const InstructionSet newest = instruction_set();
  if (newest == InstructionSet::NONE) return 0;
  int run = 0;
  for (int trial = 0; trial < 200000; ++trial) {
    const scan::Program program = random_scan();
    if (program.problem()) continue;
    for (InstructionSet set : {InstructionSet::AVX2, newest}) {
      scan::Work work{program, number_below(4), number_below(run % 8 ? 12 : 300), {}, {}, {}, {}, set};
      std::vector<std::unique_ptr<float[]>> arrays;
      const auto make = [&](int64_t elements) {
        arrays.push_back(random_array<float>(size_t(elements)));
        return arrays.back().get();
      };
      for (int64_t i = 0; i < program.inputs; ++i) {
        const int64_t columns = program.columns[i];
        switch (program.kind(i)) {
          case Kind::STATE:
            work.inputs.push_back(make(work.rows * columns));
            work.last.push_back(make(work.rows * columns));
            break;
          case Kind::SLICE: work.inputs.push_back(make(work.times * work.rows * columns)); break;
          case Kind::MATRIX: {
            const int64_t rows = number_below(program.columns[program.states] + 1);
            work.inputs.push_back(make(rows * columns));
            work.factors.emplace_back(work.inputs.back(), rows, columns, set);
            break;
          }
          default: work.inputs.push_back(make(columns));
        }
      }
      for (int64_t i = 0; i < program.outputs; ++i) {
        work.outputs.push_back(make(work.times * work.rows * program.columns[program.inputs + i]));
      }
      if (work.problem()) continue;
      for (int64_t task = 0; task < work.tasks(); ++task) scan::run(work, task);
      ++run;
    }
  }
  return run;
}

int run_packed_products() {
  const InstructionSet newest = instruction_set();
  if (newest == InstructionSet::NONE) return 0;
  int run = 0;
  for (; run < 400; ++run) {
    packed::Matrix w;
    w.rows = 1 + number_below(run % 4 ? 40 : 700);
    w.columns = 1 + number_below(run % 3 ? 40 : 700);
    w.block = packed::MIN_BLOCK << number_below(4);
    w.bits = 2 << number_below(3);
    w.measure();
    const int64_t blocks = w.rows * w.blocks, rows = number_below(run % 8 ? 9 : 600);
    const auto bytes = [](int64_t n) {
      std::unique_ptr<uint8_t[]> array(new uint8_t[size_t(n)]);
      for (int64_t i = 0; i < n; ++i) array[i] = uint8_t(number_below(256));
      return array;
    };
    const auto integers = bytes(w.rows * w.row_bytes), zeros = bytes(w.rows * w.zero_bytes);
    const auto scales = random_array<float>(blocks), float_zeros = random_array<float>(blocks);
    w.integers = integers.get();
    w.scales = scales.get();
    const int64_t kind = number_below(3);
    w.zeros = kind == 1 ? zeros.get() : nullptr;
    w.float_zeros = kind == 2 ? float_zeros.get() : nullptr;
    for (bool is_transposed : {false, true}) {
      for (InstructionSet set : {InstructionSet::AVX2, newest}) {
        packed::Work work{w, is_transposed, rows, nullptr, nullptr, nullptr, set};
        const auto left = random_array<float>(rows * work.inner());
        const auto bias = random_array<float>(work.outer());
        const auto result = random_array<float>(rows * work.outer());
        work.left = left.get();
        work.bias = number_below(2) ? bias.get() : nullptr;
        work.result = result.get();
        for (int64_t task = work.tasks(); task--;) packed::run(work, task);
      }
    }
  }
  return run;
}

}  // namespace

// Return whether buffers start at a line of the cache.
bool are_aligned() {
  for (int64_t size = 1; size < 100; ++size) {
    const Buffer one(size), other(size);
    if (reinterpret_cast<uintptr_t>(one.data()) % 64 || reinterpret_cast<uintptr_t>(other.data()) % 64) return false;
  }
  return true;
}

int main() {
  const int scans = run_scans();
  const int packed_products = run_packed_products();
  const int low_ranks = run_low_ranks();
  const int products = run_products();
  const int gathers = run_gathers<int32_t>() + run_gathers<int64_t>();
  const int rows = run_rows();
  const int norms = run_batch_norms();
  const int convolutions = run_convolutions() + run_dense_convolutions();
  const int pools = run_pools<float>() + run_pools<double>();
  const int programs = run_elementwise<float>() + run_elementwise<double>();
  std::printf("%d random programs, %d random pools, %d random convolutions, %d random norms, %d random rows, "
              "%d random loops, %d random packed products, %d random gradients of low rank, %d random gradients of Gather, %d random products\n",
              programs, pools, convolutions, norms, rows, scans, packed_products, low_ranks, gathers, products);
  const bool has_products = instruction_set() != InstructionSet::NONE;
  return programs > 100 && (scans > 100 || !has_products) && are_aligned() ? 0 : 1;
}

#include <array>

#include <cstring>

#include "amx_loops.h"
#include "check.h"
#include "low_rank.h"
#include "packed.h"
#include "product.h"

namespace {

// Eight tiles in software, with the numbers of AMX's instructions.
class SoftwareTiles {
 public:
  template <int TILE>
  void zero() { std::memset(tiles_[TILE], 0, sizeof tiles_[TILE]); }
  template <int TILE>
  void load(const float* from, int64_t pitch) {
    for (int row = 0; row < 16; ++row) std::memcpy(tiles_[TILE][row], bytes(from) + row * pitch, 64);
  }
  template <int TILE>
  void store(float* to, int64_t pitch) {
    for (int row = 0; row < 16; ++row) std::memcpy(const_cast<char*>(bytes(to)) + row * pitch, tiles_[TILE][row], 64);
  }
  template <int SUMS, int A, int B>
  void add_products() {
    for (int row = 0; row < 16; ++row) {
      for (int pair = 0; pair < 16; ++pair) {
        for (int column = 0; column < 16; ++column) {
          const uint32_t a = tiles_[A][row][pair], b = tiles_[B][pair][column];
          const float sum = number(tiles_[SUMS][row][column]) + number(a << 16) * number(b << 16) +
                            number(a & 0xffff0000) * number(b & 0xffff0000);
          std::memcpy(&tiles_[SUMS][row][column], &sum, sizeof sum);
        }
      }
    }
  }

 private:
  uint32_t tiles_[8][16][16] = {};

  static const char* bytes(const float* place) { return reinterpret_cast<const char*>(place); }
  static float number(uint32_t bits) {
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
};

constexpr bfloat16::Multiplier SOFTWARE_TILES{bfloat16::TILE_ROWS, bfloat16::add_tiles<SoftwareTiles>};

using product::Precision;

// Multiply matrices of random strides, in arrays that end with their last element.
void multiply_random_matrices(
    int trial, InstructionSet set, Precision precision = Precision::FLOAT32,
    const bfloat16::Multiplier* multiplier = nullptr) {
  const auto size = [trial](int64_t most) { return 1 + number_below(trial % 7 ? 40 : most); };
  product::Work work{};
  work.sizes = {{1 + number_below(3), 1, 1 + number_below(3)}, size(450), size(300), size(300)};
  work.alpha = 0.5f;
  work.has_relu = trial % 4 == 0;
  work.instructions = set;
  work.precision = precision;
  work.multiplier = multiplier;
  const std::array<int64_t, product::BATCH_AXES> batch = work.sizes.batch;
  const int64_t rows = work.sizes.rows, columns = work.sizes.columns, steps = work.sizes.steps;
  Arrays<float> arrays;
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
    matrix = {arrays.make(offset + elements), {offset, {strides[0], strides[1], strides[2]}, strides[3], strides[4]}};
  };
  make(work.a, rows, steps, 0);
  make(work.b, steps, columns, 0);
  make(work.y, rows, columns, 2);
  work.addends = size_t(number_below(3));
  for (size_t i = 0; i < work.addends; ++i) make(work.addend[i], rows, columns, 1);
  work.parts = product::fastest_parts(work);
  for (int64_t task = 0; task < work.tasks(); ++task) product::multiply(work, task);

  const std::array<int64_t, 3> indices{batch[0] - 1, 0, number_below(batch[2])};
  const auto at = [&](const auto& matrix, int64_t row, int64_t column) {
    return double(matrix.of(indices)[row * matrix.view.row + column * matrix.view.column]);
  };
  const auto factor = [&](const auto& matrix, int64_t row, int64_t column) {
    const double number = at(matrix, row, column);
    return precision == Precision::BF16 ? nearest_bfloat16(float(number)) : number;
  };
  const double of_size = precision == Precision::BF16X3 ? OF_SIZE + 0x1p-15 : OF_SIZE;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      Sum sum;
      for (int64_t step = 0; step < steps; ++step) {
        sum += double(work.alpha) * factor(work.a, row, step) * factor(work.b, step, column);
      }
      for (size_t i = 0; i < work.addends; ++i) sum += at(work.addend[i], row, column);
      const double expected = work.has_relu ? std::max(sum.value, 0.0) : sum.value;
      require_near("product", at(work.y, row, column), expected, of_size * sum.size);
    }
  }
}

// Multiply rows with a factor that is copied once.
void multiply_random_factor(InstructionSet set, const bfloat16::Multiplier* multiplier) {
  const int64_t rows = number_below(40), steps = number_below(90), columns = 1 + number_below(90);
  Arrays<float> arrays;
  const float *a = arrays.make(rows * steps), *b = arrays.make(steps * columns), *addend = arrays.make(columns);
  float* const y = arrays.make(rows * columns);
  const product::Factor factor(b, steps, columns, set, multiplier);
  factor.multiply({a, steps}, {addend, 0}, {y, columns}, rows);
  const auto number = [&](float of) { return multiplier ? nearest_bfloat16(of) : double(of); };
  for (int64_t i = 0; i < rows * columns; ++i) {
    Sum sum;
    sum += double(addend[i % columns]);
    for (int64_t step = 0; step < steps; ++step) {
      sum += number(a[i / columns * steps + step]) * number(b[step * columns + i % columns]);
    }
    require_near("factor", double(y[i]), sum.value, OF_SIZE * sum.size);
  }
}

// A random matrix of packed integers, and its numbers.
struct PackedMatrix {
  packed::Matrix w;
  std::vector<double> numbers;

  explicit PackedMatrix(int trial) {
    w.rows = 1 + number_below(trial % 4 ? 40 : 700);
    w.columns = 1 + number_below(trial % 3 ? 40 : 700);
    w.block = packed::MIN_BLOCK << number_below(4);
    w.bits = 2 << number_below(3);
    w.measure();
    const int64_t kind = number_below(3);
    w.integers = random_bytes(w.rows * w.row_bytes);
    w.scales = floats_.make(w.rows * w.blocks);
    if (kind == 1) w.zeros = random_bytes(w.rows * w.zero_bytes);
    if (kind == 2) w.float_zeros = floats_.make(w.rows * w.blocks);
    for (int64_t row = 0; row < w.rows; ++row) {
      for (int64_t column = 0; column < w.columns; ++column) numbers.push_back(number(row, column));
    }
  }

 private:
  Arrays<float> floats_;
  std::vector<std::unique_ptr<uint8_t[]>> bytes_;

  const uint8_t* random_bytes(int64_t n) {
    bytes_.emplace_back(new uint8_t[size_t(n)]);
    for (int64_t i = 0; i < n; ++i) bytes_.back()[size_t(i)] = uint8_t(number_below(256));
    return bytes_.back().get();
  }

  double number(int64_t row, int64_t column) const {
    const auto integer = [this](const uint8_t* bytes, int64_t i) {
      return double(bytes[i * w.bits / 8] >> i * w.bits % 8 & ((1 << w.bits) - 1));
    };
    const int64_t block = column / w.block, of_all = row * w.blocks + block;
    double zero = double(1 << (w.bits - 1));
    if (w.zeros) zero = integer(w.zeros + row * w.zero_bytes, block);
    if (w.float_zeros) zero = double(w.float_zeros[of_all]);
    return double(w.scales[of_all]) * (integer(w.integers + row * w.row_bytes, column) - zero);
  }
};

void multiply_packed(const PackedMatrix& matrix, int64_t rows, bool is_transposed, InstructionSet set) {
  const packed::Matrix& w = matrix.w;
  packed::Work work{w, is_transposed, rows, nullptr, nullptr, nullptr, set};
  const int64_t inner = work.inner(), outer = work.outer();
  Arrays<float> arrays;
  work.left = arrays.make(rows * inner);
  work.bias = is_transposed && number_below(2) ? arrays.make(outer) : nullptr;
  work.result = arrays.make(rows * outer);
  for (int64_t task = work.tasks(); task--;) packed::run(work, task);
  for (int64_t row = 0; row < rows; row += 1 + number_below(rows / 8 + 1)) {
    std::vector<Sum> sums(static_cast<size_t>(outer));
    for (int64_t i = 0; i < outer; ++i) {
      for (int64_t k = 0; k < inner; ++k) {
        const int64_t place = is_transposed ? i * w.columns + k : k * w.columns + i;
        sums[size_t(i)] += double(work.left[row * inner + k]) * matrix.numbers[size_t(place)];
      }
      if (work.bias) sums[size_t(i)] += double(work.bias[i]);
    }
    require_sums("packed product", work.result + row * outer, sums);
  }
}

void differentiate_low_rank(int trial, InstructionSet set) {
  low_rank::Gradient work{};
  work.rows = number_below(trial % 8 ? 100 : 1500);
  work.rank = 1 + number_below(low_rank::MAX_RANK);
  work.scale = 0.5f;
  work.instructions = set;
  Arrays<float> arrays;
  std::array<std::vector<double>, 2> products, sizes;  // u and v, and the sums of their absolute terms
  for (size_t i = 0; i < 2; ++i) {
    const int64_t columns = low_rank::COLUMNS * (1 + number_below(9));
    float* matrix = arrays.make(work.padded_rank() * columns);
    std::fill(matrix + work.rank * columns, matrix + work.padded_rank() * columns, 0.0f);
    const float* rows = arrays.make(work.rows * columns);
    work.factors[i] = {rows, columns, matrix};
    for (int64_t row = 0; row < work.rows; ++row) {
      for (int64_t k = 0; k < work.rank; ++k) {
        Sum sum;
        for (int64_t j = 0; j < columns; ++j) {
          sum += double(work.scale) * double(rows[row * columns + j]) * double(matrix[k * columns + j]);
        }
        products[i].push_back(sum.value);
        sizes[i].push_back(sum.size);
      }
    }
  }
  work.parts = arrays.make(work.tasks() * work.part());
  for (int64_t task = 0; task < work.tasks(); ++task) low_rank::differentiate(work, task);
  float* results[2];
  for (size_t i = 0; i < 2; ++i) results[i] = arrays.make(work.rank * work.factors[i].columns);
  low_rank::add_parts(work, results[0], results[1]);
  for (size_t i = 0; i < 2; ++i) {
    const auto& [rows, columns, matrix] = work.factors[i];
    for (int64_t k = 0; k < work.rank; ++k) {
      for (int64_t j = 0; j < columns; ++j) {
        double sum = 0, size = 0;
        for (int64_t row = 0; row < work.rows; ++row) {
          const size_t place = size_t(row * work.rank + k);
          sum += products[1 - i][place] * double(rows[row * columns + j]);
          size += sizes[1 - i][place] * std::abs(double(rows[row * columns + j]));
        }
        require_near("low rank", double(results[i][k * columns + j]), sum, OF_SIZE * size);
      }
    }
  }
}

}  // namespace

void test_product(double share) {
  for (InstructionSet set : instruction_sets()) {
    for (int trial = 0; trial < int(700 * share); ++trial) multiply_random_matrices(trial, set);
    if (set == InstructionSet::NONE) continue;
    for (const auto* multiplier : {static_cast<const bfloat16::Multiplier*>(nullptr), bfloat16::multiplier(), &SOFTWARE_TILES}) {
      for (int trial = 0; trial < int(70 * share); ++trial) multiply_random_factor(set, multiplier);
      for (Precision precision : {Precision::BF16, Precision::BF16X3}) {
        for (int trial = 0; trial < int(70 * share); ++trial) {
          multiply_random_matrices(trial, set, precision, multiplier);
        }
      }
    }
  }
}

void test_packed(double share) {
  for (int trial = 0; trial < int(400 * share); ++trial) {
    const PackedMatrix matrix(trial);
    for (InstructionSet set : instruction_sets()) {
      const int64_t rows = number_below(trial % 8 ? 9 : 600);
      for (bool is_transposed : {false, true}) multiply_packed(matrix, rows, is_transposed, set);
    }
  }
}

void test_low_rank(double share) {
  for (InstructionSet set : instruction_sets()) {
    for (int trial = 0; trial < int(100 * share); ++trial) differentiate_low_rank(trial, set);
  }
}

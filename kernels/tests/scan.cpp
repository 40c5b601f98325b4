#include "scan.h"

#include "programs.h"

namespace {

using Kind = scan::Program::Kind;
using Number = Bounded<float>;

// A place of so many columns in a random buffer. Some places do not exist.
scan::Place random_place(const scan::Program& program, int64_t columns) {
  const int64_t buffer = number_below(int64_t(program.columns.size()));
  const int64_t beyond = number_below(20) == 0 ? 2 : 0;
  const int64_t last = program.columns[size_t(buffer)] - columns + beyond;
  return {buffer - (number_below(40) == 0), last > 0 ? number_below(last + 1) : 0};
}

// A program of random instructions; most are refused.
scan::Program random_program() {
  scan::Program program{1 + number_below(2), 1 + number_below(2), 1, 1, 0, number_below(3), {}, {}, {}, false};
  program.inputs = program.states + program.slices + 3;
  const int64_t temporaries = 1 + number_below(3);
  const int64_t columns = 1 + number_below(40);
  for (int64_t i = 0; i < program.inputs + program.outputs + temporaries; ++i) {
    program.columns.push_back(number_below(3) ? columns : 2 * columns);
  }
  program.columns[size_t(program.inputs - 1)] = 1;  // the scalar
  const int64_t instructions = 2 + number_below(4);
  std::vector<int64_t> numbers;
  const auto write = [&](scan::Place place) {
    numbers.push_back(place.buffer);
    numbers.push_back(place.column);
  };
  for (int64_t i = 0; i < instructions; ++i) {
    const int64_t code = number_below(scan::PRODUCT + 1);
    const int64_t result = program.inputs + number_below(program.outputs + temporaries);
    const int64_t n = number_below(4) ? program.columns[size_t(result)] : columns;
    numbers.push_back(code);
    numbers.push_back(n);
    write({result, number_below(4) || n == program.columns[size_t(result)] ? 0 : n});
    scan::Instruction instruction{code, n, {}, {}};
    for (size_t j = 0; j < instruction.count(); ++j) {
      scan::Place place = random_place(program, n);
      if (code == scan::PRODUCT && j == 1) place = {program.states + program.slices, 0};
      if (code == scan::PRODUCT && j == 2 && number_below(2)) place = {scan::NOTHING, 0};
      write(place);
    }
  }
  require(scan::read(numbers, program.instructions), "a program is not read");
  numbers.resize(size_t(number_below(int64_t(numbers.size()))));
  std::vector<scan::Instruction> cut;
  scan::read(numbers, cut);  // must not read beyond the end
  for (int64_t i = 0; i < program.states; ++i) {
    program.next.push_back(random_place(program, program.columns[size_t(i)]));
  }
  program.is_reverse = number_below(2);
  return program;
}

// Return whether an instruction writes columns that it reads at another place: no program of onnxfit
// does, and its result depends on the order of the columns.
bool overlaps(const scan::Instruction& i) {
  for (size_t j = 0; j < i.count(); ++j) {
    const bool is_product = i.code == scan::PRODUCT;
    if (i.operands[j].buffer != i.result.buffer || (is_product && j == 1)) continue;
    if (is_product || i.operands[j].column != i.result.column) return true;
  }
  return false;
}

// The arrays of a run, and a row of all buffers of a program.
class Run {
 public:
  // With a multiplier, the factors of products are rounded to bfloat16.
  Run(const scan::Program& program, int64_t times, int64_t rows, InstructionSet set,
      const bfloat16::Multiplier* multiplier)
      : program_(program), work_{program, times, rows, {}, {}, {}, {}, set}, is_rounded_(multiplier) {
    if (multiplier) work_.rows_of_tile = multiplier->rows;
    for (int64_t i = 0; i < program.inputs; ++i) {
      const int64_t columns = program.columns[size_t(i)];
      switch (program.kind(i)) {
        case Kind::STATE:
          work_.inputs.push_back(arrays_.make(rows * columns));
          work_.last.push_back(arrays_.make(rows * columns));
          break;
        case Kind::SLICE: work_.inputs.push_back(arrays_.make(times * rows * columns)); break;
        case Kind::MATRIX: {
          matrix_rows_ = number_below(program.columns[size_t(program.states)] + 1);
          work_.inputs.push_back(arrays_.make(matrix_rows_ * columns));
          work_.factors.emplace_back(work_.inputs.back(), matrix_rows_, columns, set, multiplier);
          break;
        }
        default: work_.inputs.push_back(arrays_.make(columns));
      }
    }
    for (int64_t i = 0; i < program.outputs; ++i) {
      work_.outputs.push_back(arrays_.make(times * rows * program.columns[size_t(program.inputs + i)]));
    }
  }

  bool is_valid() const { return !work_.problem(); }

  void run() {
    for (int64_t task = 0; task < work_.tasks(); ++task) scan::run(work_, task);
  }

  // Compare one row of all steps. Return how many numbers are compared.
  int compare(int64_t row) {
    int known = 0;
    std::vector<std::vector<Number>> buffers;
    for (int64_t columns : program_.columns) buffers.emplace_back(size_t(columns));
    for (int64_t i = 0; i < program_.states; ++i) read(i, row, buffers);
    for (int64_t step = 0; step < work_.times; ++step) {
      const int64_t time = program_.is_reverse ? work_.times - 1 - step : step;
      for (int64_t i = program_.states; i < program_.inputs; ++i) {
        if (program_.kind(i) == Kind::SLICE) read(i, time * work_.rows + row, buffers);
        else if (program_.kind(i) != Kind::MATRIX) read(i, 0, buffers);
      }
      for (const scan::Instruction& i : program_.instructions) run(i, buffers);
      for (int64_t i = 0; i < program_.outputs; ++i) {
        const std::vector<Number>& expected = buffers[size_t(program_.inputs + i)];
        known += compare(work_.outputs[size_t(i)], time * work_.rows + row, expected);
      }
      for (int64_t i = 0; i < program_.states; ++i) {
        const auto [buffer, column] = program_.next[size_t(i)];
        std::copy_n(buffers[size_t(buffer)].begin() + column, program_.columns[size_t(i)], buffers[size_t(i)].begin());
      }
    }
    for (int64_t i = 0; i < program_.states; ++i) {
      known += compare(work_.last[size_t(i)], row, buffers[size_t(i)]);
    }
    return known;
  }

 private:
  const scan::Program& program_;
  Arrays<float> arrays_;
  scan::Work work_;
  bool is_rounded_;
  int64_t matrix_rows_ = 0;

  void read(int64_t input, int64_t row, std::vector<std::vector<Number>>& buffers) const {
    std::vector<Number>& to = buffers[size_t(input)];
    const float* from = work_.inputs[size_t(input)] + row * int64_t(to.size());
    for (size_t i = 0; i < to.size(); ++i) to[i] = from[i];
  }

  void run(const scan::Instruction& i, std::vector<std::vector<Number>>& buffers) const {
    std::vector<Number> results;
    for (int64_t column = 0; column < i.columns; ++column) {
      Number of[scan::MAX_OPERANDS];
      for (size_t j = 0; j < i.count(); ++j) {
        const auto [buffer, first] = i.operands[j];
        if (buffer == scan::NOTHING || program_.kind(buffer) == Kind::MATRIX) continue;
        const bool is_scalar = program_.kind(buffer) == Kind::SCALAR;
        of[j] = buffers[size_t(buffer)][size_t(is_scalar ? 0 : first + (i.code == scan::PRODUCT && j == 0 ? 0 : column))];
      }
      if (i.code == scan::PRODUCT) results.push_back(product(i, column, of[2], buffers));
      else results.push_back(i.code == scan::COPY ? of[0] : expected_result(i.code, of));
    }
    std::copy(results.begin(), results.end(), buffers[size_t(i.result.buffer)].begin() + i.result.column);
  }

  // Sums may be added up in any order: an error is counted for each product.
  Number product(
      const scan::Instruction& i, int64_t column, const Number& addend,
      const std::vector<std::vector<Number>>& buffers) const {
    const float* matrix = work_.inputs[size_t(i.operands[1].buffer)];
    const auto [buffer, first] = i.operands[0];
    long double value = addend.value, error = addend.error, size = std::abs(addend.value);
    for (int64_t k = 0; k < matrix_rows_; ++k) {
      const Number term =
          factor(buffers[size_t(buffer)][size_t(first + k)]) * factor(matrix[k * i.columns + column]);
      value += term.value;
      error += term.error;
      size += std::abs(term.value);
    }
    return {value, error + (matrix_rows_ + 1) * Number::ROUNDING * size};
  }

  // Return a factor of a product, which may be rounded. An error may lead to another number of bfloat16.
  Number factor(const Number& number) const {
    if (!is_rounded_) return number;
    if (number.error == 0) return {nearest_bfloat16(float(number.value)), 0, 0};
    return {number.value, number.error + 0x1p-8L * (std::abs(number.value) + number.error)};
  }

  static int compare(const float* results, int64_t row, const std::vector<Number>& expected) {
    int known = 0;
    results += row * int64_t(expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      known += require_bounded("scan", results[i], expected[i]);
    }
    return known;
  }
};

}  // namespace

void test_scan(double share) {
  int run = 0, known = 0;
  for (int trial = 0; trial < int(200000 * share); ++trial) {
    const scan::Program program = random_program();
    if (program.problem()) continue;
    for (InstructionSet set : instruction_sets()) {
      const int64_t rows = number_below(run % 8 ? 12 : 300);
      Run one(program, number_below(4), rows, set, number_below(2) ? product::multiplier_for(set) : nullptr);
      if (!one.is_valid()) continue;
      one.run();
      ++run;
      const auto& all = program.instructions;
      if (std::any_of(all.begin(), all.end(), overlaps)) continue;
      for (int64_t row = 0; row < rows; row += rows < 12 ? 1 : 37) known += one.compare(row);
    }
  }
  require(instruction_sets().empty() || run > 100 * share, "too few programs are valid");
  require(instruction_sets().empty() || known > 1000 * share, "too few numbers are compared");
}

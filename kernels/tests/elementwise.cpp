#include "elementwise.h"

#include "programs.h"

namespace {

// A program of random numbers; most are refused.
elementwise::Program random_program() {
  // Two tensors, a spread input and a scalar.
  elementwise::Program program{2, 4, 2, 2, {}};
  program.spread.push_back({1 + number_below(40), 1 + number_below(600)});
  std::vector<int64_t> numbers;
  const int64_t instructions = 2 + number_below(5);
  for (int64_t i = 0; i < instructions; ++i) {
    const int64_t code = number_below(elementwise::CODES);
    numbers.push_back(code);
    numbers.push_back(4 + number_below(5) - (number_below(50) == 0 ? 5 : 0));
    for (size_t j = 0; j < elementwise::signature(code).operands(); ++j) {
      const char kind = elementwise::signature(code).text[j];
      numbers.push_back(kind == 's' ? 3 : number_below(8));
    }
  }
  require(elementwise::read(numbers, program.instructions), "a program is not read");
  numbers.resize(size_t(number_below(int64_t(numbers.size()))));
  std::vector<elementwise::Instruction> cut;
  elementwise::read(numbers, cut);  // must not read beyond the end
  return program;
}

// Return an element of each operand of a program, given those of its inputs.
template <typename T>
std::vector<Bounded<T>> run_element(
    const elementwise::Program& program, std::vector<Bounded<T>> numbers) {
  numbers.resize(program.inputs + program.outputs + program.temporaries);
  for (const elementwise::Instruction& i : program.instructions) {
    Bounded<T> operands[elementwise::MAX_OPERANDS];
    for (size_t j = 0; j < elementwise::signature(i.code).operands(); ++j) {
      operands[j] = numbers[size_t(i.operands[j])];
    }
    numbers[size_t(i.result)] = expected_result(i.code, operands);
  }
  return numbers;
}

template <typename T>
void run_program(const elementwise::Program& program, size_t n, int64_t longest_piece) {
  Arrays<T> arrays;
  elementwise::Work<T> work{&program, n, {}, {}};
  if (number_below(2) == 0) work.large_work = 0;
  std::vector<const T*> inputs;
  const int64_t small = 1 + number_below(1000);  // elements of a spread input
  for (size_t i = 0; i < program.inputs; ++i) {
    inputs.push_back(
        arrays.make(program.is_scalar(i) ? 1 : program.is_spread(i) ? small : int64_t(n)));
    if (program.is_spread(i)) work.sizes.push_back(size_t(small));
    const bool is_in_pieces = longest_piece && i + 1 == program.tensors;
    for (size_t end = 0; is_in_pieces && end < n;) {
      const size_t size = std::min(n - end, size_t(number_below(longest_piece)));
      T* piece = arrays.make(int64_t(size));
      std::copy_n(inputs[i] + end, size, piece);
      work.pieces.push_back({piece, end += size});
    }
    work.inputs.push_back(is_in_pieces ? nullptr : inputs[i]);
  }
  for (size_t i = 0; i < program.outputs; ++i) work.outputs.push_back(arrays.make(int64_t(n)));
  for (size_t task = 0; task < work.tasks(); ++task) elementwise::run(work, task);
  for (size_t at = 0; at < n; ++at) {
    std::vector<Bounded<T>> numbers;
    for (size_t i = 0; i < program.inputs; ++i) {
      size_t place = program.is_scalar(i) ? 0 : at;
      if (program.is_spread(i)) {
        const elementwise::Spread& by = program.spread[i - program.tensors];
        const size_t run = size_t(by.run);
        place = (at / (run * size_t(by.repeats)) * run + at % run) % size_t(small);
      }
      numbers.emplace_back(inputs[i][place]);
    }
    numbers = run_element(program, numbers);
    for (size_t i = 0; i < program.outputs; ++i) {
      require_bounded("elementwise program", work.outputs[i][at], numbers[program.inputs + i]);
    }
  }
}

// Each instruction, over many exponents of its operands.
void test_instructions() {
  constexpr int64_t count = 1000;
  for (int64_t code = 0; code < elementwise::CODES; ++code) {
    const elementwise::Signature& signature = elementwise::signature(code);
    int known = 0;
    for (int exponent = -20; exponent <= 7; ++exponent) {
      Arrays<float> arrays;
      std::array<elementwise::Rows<float>, elementwise::MAX_OPERANDS> operands{};
      for (size_t i = 0; i < signature.operands(); ++i) {
        const bool is_scalar = signature.text[i] == 's' || (signature.text[i] == '?' && number_below(3) == 0);
        operands[i] = {arrays.make(count), is_scalar ? 0 : count, is_scalar};
        for (int64_t j = 0; j < count; ++j) {
          operands[i].data[j] = std::ldexp(operands[i].data[j], exponent);
        }
      }
      float* result = arrays.make(count);
      elementwise::run_rows(code, operands, {result, count, false}, 1, count);
      for (int64_t j = 0; j < count; ++j) {
        Bounded<float> numbers[elementwise::MAX_OPERANDS];
        for (size_t i = 0; i < signature.operands(); ++i) {
          numbers[i] = operands[i].data[operands[i].is_scalar ? 0 : j];
        }
        known += require_bounded("instruction", result[j], expected_result(code, numbers));
      }
    }
    require(known > 10000, "too few results of an instruction are compared");
  }
}

template <typename T>
void test_programs(double share) {
  int run = 0;
  for (size_t n : {1, 2, 511, 512, 513, 8191, 8192, 8193, 20001}) {
    for (int trial = 0; trial < int(5000 * share); ++trial) {
      const elementwise::Program program = random_program();
      if (program.problem()) continue;
      run_program<T>(program, n, trial % 2 == 0 ? 0 : trial % 4 == 1 ? 3000 : 50);
      ++run;
    }
  }
  require(run > 100 * share, "too few programs are valid");
}

}  // namespace

void test_elementwise(double share) {
  test_instructions();
  test_programs<float>(share);
  test_programs<double>(share);
}

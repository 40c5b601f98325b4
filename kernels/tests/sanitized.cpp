// Runs every kernel on arrays of exactly the size that it may touch, for the sanitizers to watch.
// Results are compared with the plain operators in tests/runtime/kernels, not here.
#include <cstdio>
#include <memory>
#include <random>

#include "elementwise.h"

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
      for (size_t i = 0; i < program.inputs; ++i) {
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

}  // namespace

int main() {
  const int programs = run_elementwise<float>() + run_elementwise<double>();
  std::printf("%d random programs\n", programs);
  return programs > 100 ? 0 : 1;
}

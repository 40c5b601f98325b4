#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "functions.h"
#include "tiles.h"
#include "vectorized.h"

namespace elementwise {

namespace {

constexpr Signature SIGNATURES[CODES] = {
    {"??"},  {"??"},  {"??"},   {"??"},   {"??"},     // ADD, SUB, MUL, DIV, MAX
    {"??"},  {"?"},   {"?"},    {"?"},    {"?"},      // MIN, SQRT, NEG, ABS, RECIPROCAL
    {"?"},   {"?"},   {"?"},    {"?"},    {"vss"},    // EXP, ERF, TANH, SIGMOID, HARD_SIGMOID
    {"?"},   {"vss"},                                 // ROUND, CLIP
    {"svv"}, {"vsv"}, {"svsv"}, {"svsv"}, {"vsvvs"},  // SCALE_ADD to NORMALIZED_STEP
    {"v?sss"}, {"vv???ss"},                           // ROUNDED, STRAIGHT_THROUGH
};

}  // namespace

const Signature& signature(int64_t code) { return SIGNATURES[code]; }

bool read(const std::vector<int64_t>& numbers, std::vector<Instruction>& instructions) {
  size_t i = 0;
  while (i < numbers.size()) {
    const int64_t code = numbers[i++];
    if (code < 0 || code >= CODES) return false;
    const size_t operands = signature(code).operands();
    if (numbers.size() - i < operands + 1) return false;
    Instruction instruction{code, numbers[i++], {}};
    std::copy_n(numbers.begin() + i, operands, instruction.operands.begin());
    i += operands;
    instructions.push_back(instruction);
  }
  return true;
}

bool Program::may_be_scalar(size_t operand) const {
  for (const Instruction& i : instructions) {
    for (size_t j = 0; j < signature(i.code).operands(); ++j) {
      if (size_t(i.operands[j]) == operand && signature(i.code).text[j] == 'v') return false;
    }
  }
  return true;
}

const char* Program::problem() const {
  if (temporaries > MAX_TEMPORARIES) return "The program has too many temporaries.";
  if (spread.size() > MAX_SPREAD) return "The program has too many spread inputs.";
  for (const Spread& each : spread) {
    if (each.run < 1 || each.repeats < 1) return "A spread input has no elements to repeat.";
  }
  const size_t numbers = inputs + outputs + temporaries;
  std::vector<bool> written(numbers, false);
  std::fill_n(written.begin(), inputs, true);
  const auto exists = [numbers](int64_t n) { return n >= 0 && static_cast<size_t>(n) < numbers; };
  for (const Instruction& i : instructions) {
    for (size_t j = 0; j < signature(i.code).operands(); ++j) {
      const int64_t operand = i.operands[j];
      if (!exists(operand)) return "The program has an unknown operand.";
      if (!written[operand]) return "The program reads an operand before it is written.";
      const char kind = signature(i.code).text[j];
      if (kind != '?' && is_scalar(operand) != (kind == 's')) {
        return "An instruction has a scalar in the place of a tensor, or the other way around.";
      }
    }
    if (!exists(i.result)) return "The program has an unknown result.";
    if (static_cast<size_t>(i.result) < inputs) return "The program writes an input.";
    written[i.result] = true;
  }
  if (!std::all_of(written.begin(), written.begin() + inputs + outputs, [](bool w) { return w; })) {
    return "The program does not write an output.";
  }
  return nullptr;
}

namespace {

struct Size {
  int64_t rows, columns;
};

#define LOOPS "function_loops.h"
#include "each_instruction_set.h"

// Run the instruction if it is a function whose products and sums the processor can fuse: the
// functions then take 0.67 to 0.76 of their time. Return false otherwise.
bool apply_fused(
    [[maybe_unused]] int64_t code, [[maybe_unused]] const Rows<float>& a,
    [[maybe_unused]] const Rows<float>& result, [[maybe_unused]] Size size) {
#ifdef HAS_LOOPS
  if (a.is_scalar) return false;
  const auto apply = OF_INSTRUCTION_SET(instruction_set(), apply_function);
  for (int64_t row = 0; row < size.rows; ++row) {
    const float* x = a.data + row * a.pitch;
    if (!apply(code, x, result.data + row * result.pitch, size.columns)) return false;
  }
  return true;
#else
  return false;
#endif
}

// NaN if x is.
template <typename T>
ALWAYS_INLINE T clipped(T x, T low, T high) {
  const T y = x < low ? low : x;
  return y > high ? high : y;
}

// Return a number that the compiler does not know. GCC makes branches of comparisons with constants,
// which take 2.6 times as long.
template <typename T>
ALWAYS_INLINE T hidden(T number) {
  const volatile T unknown = number;
  return unknown;
}

// One loop for each combination of rows and scalars, so that the compiler vectorizes all of them. The
// result may be an operand: each element is read before it is written.
template <typename T, typename F>
ALWAYS_INLINE void apply(F f, Rows<T> a, Rows<T> b, Rows<T> result, Size size) {
  const int64_t n = size.columns;
  for (int64_t row = 0; row < size.rows; ++row) {
    const T* x = a.data + row * a.pitch;
    const T* y = b.data + row * b.pitch;
    T* r = result.data + row * result.pitch;
    if (a.is_scalar && b.is_scalar) {
      const T value = f(*x, *y);
      std::fill_n(r, n, value);
    } else if (a.is_scalar) {
      const T value = *x;
      INDEPENDENT for (int64_t j = 0; j < n; ++j) r[j] = f(value, y[j]);
    } else if (b.is_scalar) {
      const T value = *y;
      INDEPENDENT for (int64_t j = 0; j < n; ++j) r[j] = f(x[j], value);
    } else {
      INDEPENDENT for (int64_t j = 0; j < n; ++j) r[j] = f(x[j], y[j]);
    }
  }
}

template <typename T, typename F>
ALWAYS_INLINE void apply(F f, Rows<T> a, Rows<T> result, Size size) {
  apply([f](T x, T) INLINE { return f(x); }, a, a, result, size);
}

// Instructions of several operators know which of their operands are scalars. `make` returns the
// function of an element for the operands of a row.
template <typename T, typename Make>
ALWAYS_INLINE void apply_each(Make make, const Rows<T>* of, Rows<T> result, Size size) {
  for (int64_t row = 0; row < size.rows; ++row) {
    const auto f = make([of, row](size_t i) INLINE -> const T* { return of[i].data + row * of[i].pitch; });
    T* r = result.data + row * result.pitch;
    INDEPENDENT for (int64_t j = 0; j < size.columns; ++j) r[j] = f(j);
  }
}

// Call `run` with a function that returns the operand of a row for an element: a scalar, or a block.
template <typename T, typename F>
ALWAYS_INLINE void with_operand(const Rows<T>& operand, F run) {
  if (operand.is_scalar) {
    run([value = *operand.data](auto) INLINE { return [value](int64_t) INLINE { return value; }; });
  } else {
    run([](const T* x) INLINE { return [x](int64_t j) INLINE { return x[j]; }; });
  }
}

template <typename T>
ALWAYS_INLINE void run_instruction(
    int64_t code, const Rows<T>* of, const Rows<T>& r, Size n) {
  const Rows<T>&a = of[0], &b = of[1];
  if constexpr (std::is_same_v<T, float>) {
    if (code >= EXP && code <= SIGMOID && apply_fused(code, a, r, n)) return;
  }
  const auto scalar = [of](size_t i) INLINE -> T { return *of[i].data; };
  switch (code) {
    case ADD: return apply([](T x, T y) INLINE { return x + y; }, a, b, r, n);
    case SUB: return apply([](T x, T y) INLINE { return x - y; }, a, b, r, n);
    case MUL: return apply([](T x, T y) INLINE { return x * y; }, a, b, r, n);
    case DIV: return apply([](T x, T y) INLINE { return x / y; }, a, b, r, n);
    case MAX: return apply([](T x, T y) INLINE { return x > y || x != x ? x : y; }, a, b, r, n);
    case MIN: return apply([](T x, T y) INLINE { return x < y || x != x ? x : y; }, a, b, r, n);
    case SQRT: return apply([](T x) INLINE { return std::sqrt(x); }, a, r, n);
    case NEG: return apply([](T x) INLINE { return -x; }, a, r, n);
    case ABS: return apply([](T x) INLINE { return std::abs(x); }, a, r, n);
    case RECIPROCAL: return apply([](T x) INLINE { return T(1) / x; }, a, r, n);
    case EXP: return apply([](T x) INLINE { return functions::exponential(x); }, a, r, n);
    case ERF: return apply([](T x) INLINE { return functions::error_function(x); }, a, r, n);
    case TANH: return apply([](T x) INLINE { return functions::hyperbolic_tangent(x); }, a, r, n);
    case SIGMOID: return apply([](T x) INLINE { return functions::sigmoid(x); }, a, r, n);
    case HARD_SIGMOID: {
      const T s = scalar(1), t = scalar(2), low = hidden(T(0)), high = hidden(T(1));
      return apply([=](T x) INLINE { return clipped(s * x + t, low, high); }, a, r, n);
    }
    case ROUND: return apply([](T x) INLINE { return std::nearbyint(x); }, a, r, n);
    case CLIP: {
      const T s = scalar(1), t = scalar(2);
      return apply([s, t](T x) INLINE { return clipped(x, s, t); }, a, r, n);
    }
    case SCALE_ADD: {
      const T s = scalar(0);
      const auto make = [s](auto row) INLINE {
        return [s, x = row(1), y = row(2)](int64_t j) INLINE { return s * x[j] + y[j]; };
      };
      return apply_each(make, of, r, n);
    }
    case SUB_SCALED: {
      const T s = scalar(1);
      const auto make = [s](auto row) INLINE {
        return [s, x = row(0), y = row(2)](int64_t j) INLINE { return x[j] - s * y[j]; };
      };
      return apply_each(make, of, r, n);
    }
    case AVERAGE: {
      const T s = scalar(0), t = scalar(2);
      const auto make = [s, t](auto row) INLINE {
        return [s, t, x = row(1), y = row(3)](int64_t j) INLINE { return s * x[j] + t * y[j]; };
      };
      return apply_each(make, of, r, n);
    }
    case AVERAGE_OF_SQUARES: {
      const T s = scalar(0), t = scalar(2);
      const auto make = [s, t](auto row) INLINE {
        return [s, t, x = row(1), y = row(3)](int64_t j) INLINE {
          return s * x[j] + t * (y[j] * y[j]);
        };
      };
      return apply_each(make, of, r, n);
    }
    case NORMALIZED_STEP: {
      const T s = scalar(1), t = scalar(4);
      const auto make = [s, t](auto row) INLINE {
        return [s, t, w = row(0), x = row(2), y = row(3)](int64_t j) INLINE {
          return w[j] - s * x[j] / (std::sqrt(y[j]) + t);
        };
      };
      return apply_each(make, of, r, n);
    }
    case ROUNDED: {
      const T low = scalar(2), high = scalar(3), t = scalar(4);
      return with_operand(of[1], [=](auto scale_of) INLINE {
        const auto make = [=](auto row) INLINE {
          return [=, x = row(0), scale = scale_of(row(1))](int64_t j) INLINE {
            const T s = scale(j);
            return s * (clipped(std::nearbyint(x[j] / s), low, high) + t);
          };
        };
        apply_each(make, of, r, n);
      });
    }
    case STRAIGHT_THROUGH: {
      const T s = scalar(5), t = scalar(6), zero = hidden(T(0)), one = hidden(T(1));
      return with_operand(of[2], [=](auto scale_of) INLINE {
        with_operand(of[3], [=](auto low_of) INLINE {
          with_operand(of[4], [=](auto high_of) INLINE {
            const auto make = [=](auto row) INLINE {
              return [=, a = row(0), b = row(1), scale = scale_of(row(2)), low = low_of(row(3)),
                      high = high_of(row(4))](int64_t j) INLINE {
                const T c = scale(j), x = b[j], outside = std::abs(clipped(x, low(j), high(j)) - x);
                return a[j] * c * clipped(s * outside + t, zero, one) / c;
              };
            };
            apply_each(make, of, r, n);
          });
        });
      });
    }
  }
}

// The place in the pieces of a tensor from which a task reads.
template <typename T>
class Reader {
 public:
  explicit Reader(const std::vector<Piece<T>>& all) : pieces(all) {}

  // Move forward to an element. Return how many of the next n elements are adjacent in memory.
  size_t move_to(size_t element, size_t n) {
    if (pieces.empty()) return n;
    // The next block is usually in this piece or the next one; a task starts anywhere.
    if (pieces[piece].end <= element && pieces[++piece].end <= element) {
      const auto is_behind = [](size_t place, const Piece<T>& each) { return place < each.end; };
      piece = size_t(std::upper_bound(pieces.begin() + piece, pieces.end(), element, is_behind) - pieces.begin());
    }
    const size_t first = piece ? pieces[piece - 1].end : 0;
    here = pieces[piece].data + (element - first);
    return std::min(n, pieces[piece].end - element);
  }
  const T* data() const { return here; }

 private:
  const std::vector<Piece<T>>& pieces;
  size_t piece = 0;  // the current one
  const T* here = nullptr;
};

// A spread input, as large as the tensors in the block where a task is.
template <typename T>
class Spreader {
 public:
  void start(const T* data, size_t size, Spread by, bool may_be_scalar) {
    all = data;
    elements = size;
    run = size_t(by.run);
    repeats = size_t(by.repeats);
    is_scalar = may_be_scalar && run == 1 && repeats >= LONG_RUN;
  }

  // Return how many of n elements, from number `begin` of the tensors on, can be read at once.
  size_t fitting(size_t begin, size_t n) const {
    return is_scalar ? std::min(n, repeats - begin % repeats) : n;
  }

  ALWAYS_INLINE void read(size_t begin, size_t n) {
    if (is_scalar) {
      here = all + begin / repeats % elements;
      return;
    }
    here = block;
    for (size_t done = 0; done < n;) {
      const size_t at = begin + done, in_run = at % run;
      const T* from = all + (at / (run * repeats) * run + in_run) % elements;
      const bool is_filling = run == 1 && repeats > 1;
      size_t count = size_t(all + elements - from);
      if (is_filling) count = repeats - at % repeats;
      else if (repeats > 1) count = std::min(count, run - in_run);
      if (done == 0 && count >= n && !is_filling) {
        here = from;
        return;
      }
      count = std::min(count, n - done);
      if (is_filling) std::fill_n(block + done, count, *from);
      else std::copy_n(from, count, block + done);
      done += count;
    }
  }

  // Return the elements that were read last.
  Rows<T> rows() const { return {const_cast<T*>(here), 0, is_scalar}; }

 private:
  const T *all = nullptr, *here = nullptr;
  size_t elements = 0, run = 1, repeats = 1;
  bool is_scalar = false;
  alignas(64) T block[BLOCK];
};

// Where an operand is: its first element, and 1 if each block has other elements of it, else 0.
template <typename T>
struct Place {
  T* data;
  size_t step;
  bool is_scalar;

  ALWAYS_INLINE Rows<T> at(size_t element) const { return {data + element * step, 0, is_scalar}; }
};

template <typename T>
ALWAYS_INLINE void run_task(const Work<T>& work, size_t task) {
  const Program& program = *work.program;
  alignas(64) T temporaries[MAX_TEMPORARIES][BLOCK];
  Spreader<T> spread[MAX_SPREAD];
  const size_t spread_inputs = program.spread.size();
  for (size_t i = 0; i < spread_inputs; ++i) {
    const size_t input = program.tensors + i;
    spread[i].start(work.inputs[input], work.sizes[i], program.spread[i], program.may_be_scalar(input));
  }
  Reader<T> reader(work.pieces);
  const size_t end = std::min((task + 1) * ELEMENTS_PER_TASK, work.elements);
  const size_t most = work.block();
  size_t begin = task * ELEMENTS_PER_TASK;
  std::vector<Place<T>> places;
  places.reserve(program.inputs + program.outputs + program.temporaries);
  for (size_t i = 0; i < program.inputs; ++i) {
    const bool is_tensor = i < program.tensors;
    places.push_back({const_cast<T*>(work.inputs[i]), is_tensor, !is_tensor});
  }
  for (T* data : work.outputs) places.push_back({data, 1, false});
  for (size_t i = 0; i < program.temporaries; ++i) places.push_back({temporaries[i], 0, false});
  while (begin < end) {
    size_t n = reader.move_to(begin, std::min(most, end - begin));
    for (size_t i = 0; i < spread_inputs; ++i) n = spread[i].fitting(begin, n);
    for (size_t i = 0; i < spread_inputs; ++i) {
      spread[i].read(begin, n);
      const Rows<T> rows = spread[i].rows();
      places[program.tensors + i] = {rows.data, 0, rows.is_scalar};
    }
    if (!work.pieces.empty()) places[program.tensors - 1] = {const_cast<T*>(reader.data()), 0, false};
    for (const Instruction& i : program.instructions) {
      Rows<T> operands[MAX_OPERANDS];
      const size_t count = signature(i.code).operands();
      for (size_t j = 0; j < count; ++j) operands[j] = places[i.operands[j]].at(begin);
      run_instruction(i.code, operands, places[i.result].at(begin), Size{1, int64_t(n)});
    }
    begin += n;
  }
}

}  // namespace

void run_rows(
    int64_t code, const std::array<Rows<float>, MAX_OPERANDS>& operands, const Rows<float>& result,
    int64_t rows, int64_t columns) {
  bool is_block = result.pitch == columns;
  for (size_t j = 0; j < signature(code).operands(); ++j) {
    is_block = is_block && (operands[j].is_scalar || operands[j].pitch == columns);
  }
  // Rows that lie behind each other are one row.
  const Size size = is_block ? Size{1, rows * columns} : Size{rows, columns};
  vectorized<run_instruction<float>>(code, operands.data(), result, size);
}

void run(const Work<float>& work, size_t task) { vectorized<run_task<float>>(work, task); }
void run(const Work<double>& work, size_t task) { vectorized<run_task<double>>(work, task); }

}  // namespace elementwise

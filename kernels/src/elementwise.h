// Several elementwise operators in one pass over the memory.
//
// A program is a list of instructions. It is run on one block of elements after the other, which
// stays in the cache in between. Each instruction rounds as the operator of ONNX does, so that the
// results have the same bits; EXP, ERF, TANH and SIGMOID, which onnxruntime approximates, too, have
// a relative error of at most 2.5e-7; a SIGMOID below 1.2e-38 may be 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace elementwise {

// A block has fewer elements in large work, whose arrays the caches do not hold: with 128 instead of 512,
// Adam on 800,000 weights takes 0.9 of the time, on 8 million 0.75, and on 200,000 weights 1.15 times.
constexpr size_t BLOCK = 512;              // elements
constexpr size_t BLOCK_OF_LARGE_WORK = 128;
constexpr size_t LARGE_WORK = 16 << 20;    // bytes of all arrays
constexpr size_t LONG_RUN = 256;           // of equal elements, which are a scalar in their blocks
constexpr size_t MAX_TEMPORARIES = 16;     // blocks of a thread, on its stack
constexpr size_t MAX_SPREAD = 8;           // the same for spread inputs
constexpr size_t ELEMENTS_PER_TASK = 8192; // of a thread at a time

// In the comments, a, b, ... are the operands in their order. Those called s and t are scalars.
enum Code : int64_t {
  ADD,                 // a + b
  SUB,                 // a - b
  MUL,                 // a b
  DIV,                 // a / b
  MAX,                 // NaN if a or b is
  MIN,                 // NaN if a or b is
  SQRT,
  NEG,
  ABS,
  RECIPROCAL,
  EXP,
  ERF,
  TANH,
  SIGMOID,
  HARD_SIGMOID,        // s a + t, at least 0 and at most 1
  ROUND,               // to the nearest whole number, half to even
  CLIP,                // at least s and at most t; NaN if a is
  // Several operators, each of which rounds its result.
  SCALE_ADD,           // s a + b
  SUB_SCALED,          // a - s b
  AVERAGE,             // s a + t b
  AVERAGE_OF_SQUARES,  // s a + t (b b)
  NORMALIZED_STEP,     // a - s b / (sqrt(c) + t)
  ROUNDED,             // b (clip(round(a / b), c, d) + s), where c and d are scalars, too
  STRAIGHT_THROUGH,    // a c clip(s |b - clip(b, d, e)| + t, 0, 1) / c
  CODES
};

constexpr size_t MAX_OPERANDS = 7;

struct Signature {
  std::string_view text;  // one letter for each operand: s for a scalar, v for a block, ? for either

  size_t operands() const { return text.size(); }
};
const Signature& signature(int64_t code);

// Operands are numbered: inputs first, then outputs, then temporaries.
struct Instruction {
  int64_t code, result;
  std::array<int64_t, MAX_OPERANDS> operands;
};

// Read instructions from one list of numbers: code, result, operands. Return false if it is none.
bool read(const std::vector<int64_t>& numbers, std::vector<Instruction>& instructions);

// How a smaller input becomes as large as the tensors: `repeats` times the first `run` elements, then
// as often the next ones, and so on; the whole begins again at its end. The scales of the rows of a
// matrix have run 1 and repeats = columns; those of its columns have run 1 and repeats 1.
struct Spread {
  int64_t run, repeats;
};

// The inputs are tensors, then spread inputs, then scalars.
struct Program {
  size_t tensors;
  size_t inputs, outputs, temporaries;
  std::vector<Instruction> instructions;
  size_t pieces = 1;  // of the last tensor, which need not lie in one place
  std::vector<Spread> spread{};

  bool is_spread(size_t operand) const { return operand >= tensors && operand < tensors + spread.size(); }
  bool is_scalar(size_t operand) const { return operand >= tensors + spread.size() && operand < inputs; }

  // Return whether no instruction needs a block of a spread input, so that an element of a longer run
  // of equal ones may be a scalar.
  bool may_be_scalar(size_t operand) const;

  // Return a text that says what is wrong with the program; nullptr for nothing. Each operand must
  // be written before it is read, each output must be written, and scalars must be in their places.
  const char* problem() const;
};

// Adjacent elements of a tensor, up to the one before `end`.
template <typename T>
struct Piece {
  const T* data;
  size_t end;
};

template <typename T>
struct Work {
  const Program* program;
  size_t elements;
  std::vector<const T*> inputs;  // nullptr for a tensor in pieces
  std::vector<T*> outputs;
  std::vector<Piece<T>> pieces{};  // of the last tensor, if it has several
  std::vector<size_t> sizes{};     // of the spread inputs
  size_t large_work = LARGE_WORK;

  size_t block() const {
    const size_t arrays = program->tensors + program->outputs;
    return elements > large_work / sizeof(T) / arrays ? BLOCK_OF_LARGE_WORK : BLOCK;
  }
  size_t tasks() const { return (elements + ELEMENTS_PER_TASK - 1) / ELEMENTS_PER_TASK; }
};

// Compute the elements of one task.
void run(const Work<float>& work, size_t task);
void run(const Work<double>& work, size_t task);

// Rows of numbers, `pitch` apart: 0 for a scalar, or for one row that all rows of the result read.
template <typename T>
struct Rows {
  T* data;  // of operands, it is not written
  int64_t pitch;
  bool is_scalar;
};

// Run one instruction on rows of `columns` numbers. The result may be an operand.
void run_rows(
    int64_t code, const std::array<Rows<float>, MAX_OPERANDS>& operands, const Rows<float>& result,
    int64_t rows, int64_t columns);

}  // namespace elementwise

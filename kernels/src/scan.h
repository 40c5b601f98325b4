// A Scan over time whose body computes rows: the steps of an LSTM, for instance.
//
// A program is a list of instructions, which is run on the rows of one step after the other. No row
// reads another one, so each task goes through all steps with some of the rows, and its states and
// temporaries stay in the cache.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "elementwise.h"
#include "product.h"
#include "tiles.h"

namespace scan {

// Behind the codes of elementwise.h.
enum Code : int64_t {
  COPY = elementwise::CODES,  // a
  PRODUCT,                    // a M + b, or a M: M is a matrix
};

constexpr size_t MAX_OPERANDS = elementwise::MAX_OPERANDS;
constexpr int64_t NOTHING = -1;  // the buffer of the operand b in a M

// Columns of a buffer, from one on.
struct Place {
  int64_t buffer, column;
};

struct Instruction {
  int64_t code, columns;
  Place result;
  std::array<Place, MAX_OPERANDS> operands;

  size_t count() const;  // of operands
};

// Read instructions from one list of numbers: code, columns, and the places of the result and of the
// operands. Return false if it is none.
bool read(const std::vector<int64_t>& numbers, std::vector<Instruction>& instructions);

// Buffers are numbered: states before the step, slices of it, matrices, vectors (one row for all),
// scalars; then the outputs of the step, then temporaries.
struct Program {
  int64_t states, slices, matrices, vectors, inputs, outputs;  // numbers of buffers
  std::vector<int64_t> columns;                                // of each buffer
  std::vector<Instruction> instructions;
  std::vector<Place> next;  // the states after the step
  bool is_reverse;

  enum class Kind { STATE, SLICE, MATRIX, VECTOR, SCALAR, OUTPUT, TEMPORARY };
  Kind kind(int64_t buffer) const;

  // Return a text that says what is wrong with the program; nullptr for nothing. Each column must be
  // written before it is read, and each output must be written.
  const char* problem() const;
};

struct Work {
  const Program& program;
  int64_t times, rows;
  std::vector<const float*> inputs;
  std::vector<float*> last;     // the states after the last step
  std::vector<float*> outputs;  // of all steps
  std::vector<product::Factor> factors;  // the matrices
  InstructionSet instructions = instruction_set();
  int64_t rows_of_tile = product::tile_of(instructions).rows;  // of the products

  // Return the matrix of a product.
  const product::Factor& factor(const Instruction& product) const;

  // Return a text that says what is wrong with the matrices; nullptr for nothing.
  const char* problem() const;

  int64_t rows_per_task() const;
  int64_t tasks() const { return tiles::divide_up(rows, rows_per_task()); }
};

// Go through all steps with the rows of one task. It may throw std::bad_alloc.
void run(const Work& work, int64_t task);

}  // namespace scan

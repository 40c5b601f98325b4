#include "scan.h"

#include <algorithm>
#include <cstring>

namespace scan {

using Rows = elementwise::Rows<float>;
using Kind = Program::Kind;

size_t Instruction::count() const {
  if (code == COPY) return 1;
  if (code == PRODUCT) return 3;
  return elementwise::signature(code).operands();
}

bool read(const std::vector<int64_t>& numbers, std::vector<Instruction>& instructions) {
  for (size_t i = 0; i < numbers.size();) {
    Instruction instruction{numbers[i], 0, {}, {}};
    if (instruction.code < 0 || instruction.code > PRODUCT) return false;
    const size_t count = instruction.count();
    if (numbers.size() - i < 4 + 2 * count) return false;
    instruction.columns = numbers[i + 1];
    instruction.result = {numbers[i + 2], numbers[i + 3]};
    i += 4;
    for (size_t j = 0; j < count; ++j, i += 2) instruction.operands[j] = {numbers[i], numbers[i + 1]};
    instructions.push_back(instruction);
  }
  return true;
}

Program::Kind Program::kind(int64_t buffer) const {
  constexpr Kind kinds[] = {Kind::STATE, Kind::SLICE, Kind::MATRIX, Kind::VECTOR};
  const int64_t counts[] = {states, slices, matrices, vectors};
  int64_t end = 0;
  for (size_t i = 0; i < 4; ++i) {
    end += counts[i];
    if (buffer < end) return kinds[i];
  }
  if (buffer < inputs) return Kind::SCALAR;
  return buffer < inputs + outputs ? Kind::OUTPUT : Kind::TEMPORARY;
}

const char* Program::problem() const {
  constexpr int64_t most = int64_t(1) << 32;  // so that no sum or product below overflows
  const int64_t buffers = int64_t(columns.size());
  for (int64_t count : {states, slices, matrices, vectors, inputs, outputs}) {
    if (count < 0 || count > buffers) return "The program has fewer buffers than it says.";
  }
  if (states + slices + matrices + vectors > inputs || inputs + outputs > buffers || !slices) {
    return "The program has fewer buffers than it says.";
  }
  std::vector<std::vector<bool>> written;
  for (int64_t i = 0; i < buffers; ++i) {
    if (columns[i] < 1 || columns[i] > most) return "A buffer has no columns.";
    if (kind(i) == Kind::SCALAR && columns[i] != 1) return "A scalar has several columns.";
    written.emplace_back(kind(i) == Kind::MATRIX ? 0 : columns[i], i < inputs);
  }
  const auto exists = [&](Place place, int64_t count) {
    return place.buffer >= 0 && place.buffer < buffers && place.column >= 0 && count > 0 &&
           place.column <= int64_t(written[place.buffer].size()) - count;
  };
  const auto is_written = [&](Place place, int64_t count) {
    const auto begin = written[place.buffer].begin() + place.column;
    return std::all_of(begin, begin + count, [](bool one) { return one; });
  };
  for (const Instruction& i : instructions) {
    if (i.columns < 1 || i.columns > most) return "An instruction has no columns.";
    for (size_t j = 0; j < i.count(); ++j) {
      const Place place = i.operands[j];
      int64_t count = i.columns;
      if (i.code == PRODUCT) {
        const int64_t matrix = i.operands[1].buffer;
        if (matrix < 0 || matrix >= buffers || kind(matrix) != Kind::MATRIX ||
            columns[matrix] != i.columns || i.operands[1].column) {
          return "A product has no matrix of its size.";
        }
        if (j == 1 || (j == 2 && place.buffer == NOTHING)) continue;
        // Of the operand a, the columns are known with the matrix; here, all behind its first must
        // be written.
        if (j == 0 && exists(place, 1)) {
          if (kind(place.buffer) == Kind::VECTOR) return "A product has one row for all rows.";
          count = columns[place.buffer] - place.column;
        }
      } else if (exists(place, 1) && kind(place.buffer) == Kind::SCALAR) {
        if (i.code == COPY) return "An instruction copies a scalar.";
        count = 1;
      }
      if (!exists(place, count)) return "The program has an unknown operand.";
      const char letter =
          i.code < elementwise::CODES ? elementwise::signature(i.code).text[j] : 'v';
      if (letter != '?' && (kind(place.buffer) == Kind::SCALAR) != (letter == 's')) {
        return "An instruction has a scalar in the place of rows, or the other way around.";
      }
      if (!is_written(place, count)) return "The program reads a column before it is written.";
    }
    if (!exists(i.result, i.columns)) return "The program has an unknown result.";
    if (i.result.buffer < inputs) return "The program writes an input.";
    const auto begin = written[i.result.buffer].begin() + i.result.column;
    std::fill_n(begin, i.columns, true);
  }
  if (int64_t(next.size()) != states) return "The program does not compute each state.";
  for (int64_t i = 0; i < states; ++i) {
    if (!exists(next[i], columns[i]) || !is_written(next[i], columns[i])) {
      return "The program does not write a state.";
    }
    const Kind of_next = kind(next[i].buffer);
    if (of_next != Kind::OUTPUT && of_next != Kind::TEMPORARY) return "A state is not a result.";
  }
  for (int64_t i = inputs; i < inputs + outputs; ++i) {
    if (!is_written({i, 0}, columns[i])) return "The program does not write an output.";
  }
  return nullptr;
}

namespace {

// The two may overlap, though no program of onnxfit lets them.
void copy_rows(const Rows& from, const Rows& to, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memmove(
        to.data + row * to.pitch, from.data + row * from.pitch, size_t(columns) * sizeof(float));
  }
}

// The rows of one task in one step.
class Block {
 public:
  Block(const Work& all, int64_t first, int64_t end)
      : work(all), program(all.program), first_row(first), rows(end - first) {
    for (size_t i = 0; i < program.columns.size(); ++i) {
      const Kind kind = program.kind(int64_t(i));
      const bool is_own = kind == Kind::STATE || kind == Kind::TEMPORARY;
      memory.emplace_back(is_own ? size_t(rows * program.columns[i]) : 0);
    }
    for (int64_t i = 0; i < program.states; ++i) {
      const int64_t n = program.columns[i];
      std::copy_n(work.inputs[i] + first_row * n, rows * n, memory[i].data());
    }
  }

  void step(int64_t time) {
    now = time;
    for (const Instruction& i : program.instructions) run(i);
    for (int64_t i = 0; i < program.states; ++i) {
      const int64_t n = program.columns[i];
      copy_rows(at(program.next[i]), {memory[i].data(), n, false}, rows, n);
    }
  }

  void write_states() const {
    for (int64_t i = 0; i < program.states; ++i) {
      std::copy(
          memory[i].begin(), memory[i].end(), work.last[i] + first_row * program.columns[i]);
    }
  }

 private:
  const Work& work;
  const Program& program;
  const int64_t first_row, rows;
  int64_t now = 0;
  std::vector<std::vector<float>> memory;  // of states and temporaries

  Rows at(Place place) {
    const int64_t buffer = place.buffer, columns = program.columns[buffer];
    const auto in_time = [&](const float* data) {
      return const_cast<float*>(data) + (now * work.rows + first_row) * columns + place.column;
    };
    switch (program.kind(buffer)) {
      case Kind::SLICE: return {in_time(work.inputs[buffer]), columns, false};
      case Kind::OUTPUT: return {in_time(work.outputs[buffer - program.inputs]), columns, false};
      case Kind::VECTOR: return {const_cast<float*>(work.inputs[buffer]) + place.column, 0, false};
      case Kind::SCALAR: return {const_cast<float*>(work.inputs[buffer]), 0, true};
      default: return {memory[buffer].data() + place.column, columns, false};
    }
  }

  void run(const Instruction& i) {
    const Rows result = at(i.result);
    if (i.code == PRODUCT) return multiply(i, result);
    std::array<Rows, MAX_OPERANDS> operands{};
    for (size_t j = 0; j < i.count(); ++j) operands[j] = at(i.operands[j]);
    if (i.code == COPY) return copy_rows(operands[0], result, rows, i.columns);
    elementwise::run_rows(i.code, operands, result, rows, i.columns);
  }

  void multiply(const Instruction& i, const Rows& result) {
    const Place more = i.operands[2];
    const Rows a = at(i.operands[0]);
    const Rows addend = more.buffer == NOTHING ? Rows{nullptr, 0, false} : at(more);
    work.factor(i).multiply(
        {a.data, a.pitch}, {addend.data, addend.pitch}, {result.data, result.pitch}, rows);
  }
};

}  // namespace

const product::Factor& Work::factor(const Instruction& product) const {
  return factors[size_t(product.operands[1].buffer - program.states - program.slices)];
}

const char* Work::problem() const {
  for (const Instruction& i : program.instructions) {
    if (i.code != PRODUCT) continue;
    const Place left = i.operands[0];
    if (factor(i).steps() > program.columns[left.buffer] - left.column) {
      return "A matrix of Scan has more rows than its operand has columns.";
    }
  }
  return nullptr;
}

// Few rows are divided among as many threads as possible; of many rows, a task has enough to read the
// matrices rarely. The number of threads changes no result.
int64_t Work::rows_per_task() const {
  return rows_of_tile * std::clamp<int64_t>(rows / (8 * rows_of_tile), 1, 4);
}

void run(const Work& work, int64_t task) {
  const int64_t size = work.rows_per_task(), first = task * size;
  Block block(work, first, std::min(first + size, work.rows));
  for (int64_t i = 0; i < work.times; ++i) {
    block.step(work.program.is_reverse ? work.times - 1 - i : i);
  }
  block.write_states();
}

}  // namespace scan

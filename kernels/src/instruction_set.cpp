#include "instruction_set.h"

#include <cstdint>

#ifdef HAS_TARGETS
#include <cpuid.h>

namespace {

// Return whether the system saves these registers when it switches threads.
bool saves_registers(uint32_t registers) {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

// The builtin functions of compilers need a library that Clang does not link on Windows.
InstructionSet newest_instruction_set() {
  constexpr uint32_t fma = 1 << 12, xsave = 1 << 27;       // in c of leaf 1
  constexpr uint32_t avx2 = 1 << 5, avx512f = 1 << 16;     // in b of leaf 7
  constexpr uint32_t of_avx = 0x6, of_avx512 = of_avx | 0xe0;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return InstructionSet::BASELINE;
  const bool has_fma = c & fma;
  if (!(c & xsave) || !saves_registers(of_avx)) return InstructionSet::BASELINE;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return InstructionSet::BASELINE;
  if (!has_fma || !(b & avx2)) return InstructionSet::BASELINE;
  return b & avx512f && saves_registers(of_avx512) ? InstructionSet::AVX512 : InstructionSet::AVX2;
}

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet newest = newest_instruction_set();
  return newest;
}
#elif defined(HAS_LOOPS)
InstructionSet instruction_set() { return InstructionSet::BASELINE; }
#else
InstructionSet instruction_set() { return InstructionSet::NONE; }
#endif

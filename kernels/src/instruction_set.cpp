#include "instruction_set.h"

#include <cstdint>

#ifdef HAS_TARGETS
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Ask Linux for the registers of AMX: it gives them only to processes that ask.
bool may_use_tiles() {
#ifdef __linux__
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, the number of the registers
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

PairInstructions newest_pair_instructions() {
  constexpr uint32_t amx_bf16 = 1 << 22, amx_tile = 1 << 24;  // in d of leaf 7
  constexpr uint32_t avx512_vl = 1u << 31, avx512_bw = 1 << 30;  // in b of leaf 7
  constexpr uint32_t avx512_bf16 = 1 << 5;                    // in a of subleaf 1 of leaf 7
  constexpr uint32_t of_amx = 0x60000;
  if (instruction_set() != InstructionSet::AVX512) return PairInstructions::NONE;
  uint32_t a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PairInstructions::NONE;
  const bool has_tiles = d & amx_tile && d & amx_bf16;
  if (!(b & avx512_vl) || !(b & avx512_bw)) return PairInstructions::NONE;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return PairInstructions::NONE;
  if (!(a & avx512_bf16)) return PairInstructions::NONE;
  if (has_tiles && saves_registers(of_amx) && may_use_tiles()) return PairInstructions::AMX;
  return PairInstructions::AVX512_BF16;
}

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet newest = newest_instruction_set();
  return newest;
}

PairInstructions pair_instructions() {
  static const PairInstructions newest = newest_pair_instructions();
  return newest;
}
#elif defined(HAS_LOOPS)
InstructionSet instruction_set() { return InstructionSet::BASELINE; }
PairInstructions pair_instructions() { return PairInstructions::NONE; }
#else
InstructionSet instruction_set() { return InstructionSet::NONE; }
PairInstructions pair_instructions() { return PairInstructions::NONE; }
#endif

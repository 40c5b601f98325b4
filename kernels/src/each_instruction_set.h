// Include the file LOOPS once for each instruction set, in a namespace of its own: baseline, and on
// x86-64 avx2 and avx512, too. OF_INSTRUCTION_SET(set, name) is the one of an instruction set.
//
// Only functions that are defined here may use newer instructions. With a file and flags of its own
// for each set, the linker could choose such a copy of a function of the standard library for all.
//
// Products and sums are fused, as in the products of matrices of onnxruntime.
#ifdef HAS_LOOPS
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

namespace baseline {
#define LANES 4
#ifdef __aarch64__
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#include "vectors.h"

#include LOOPS
#undef LANES
#undef REGISTERS
}  // namespace baseline

#ifdef HAS_TARGETS
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,prfchw")
#endif
namespace avx2 {
#define LANES 8
#define REGISTERS 16
#include "vectors.h"

#include LOOPS
#undef LANES
#undef REGISTERS
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,fma,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx512f,fma,prfchw")
#endif
namespace avx512 {
#define LANES 16
#define REGISTERS 32
#include "vectors.h"

#include LOOPS
#undef LANES
#undef REGISTERS
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#endif

#define OF_INSTRUCTION_SET(set, name)                   \
  ((set) == InstructionSet::AVX512 ? avx512::name       \
   : (set) == InstructionSet::AVX2 ? avx2::name         \
                                   : baseline::name)
#else
#define OF_INSTRUCTION_SET(set, name) (static_cast<void>(set), baseline::name)
#endif

#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC pop_options
#endif
#endif

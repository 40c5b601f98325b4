// The instruction sets that loops are compiled for.
#pragma once

// Whether the compiler has vectors as types and compiles functions for several processors: GCC and
// Clang, but not Visual C++. Without vectors, there are no products of matrices. WITHOUT_VECTORS is for
// tests of that.
#if (defined(__GNUC__) || defined(__clang__)) && !defined(WITHOUT_VECTORS) && \
    (defined(__x86_64__) || defined(__aarch64__))
#define HAS_LOOPS
#ifdef __x86_64__
#define HAS_TARGETS
#endif
#endif

// Whether the compiler has instructions for pairs of bfloat16 numbers: GCC 11 and Clang 12.
#if defined(HAS_TARGETS) && (__GNUC__ >= 11 || (defined(__clang__) && __clang_major__ >= 12))
#define HAS_PAIRS
#endif

// BASELINE is what each processor of the platform has: vectors of 4 numbers (SSE2, NEON).
enum class InstructionSet { NONE, BASELINE, AVX2, AVX512 };

// Return the newest instruction set that this library is compiled for and this processor has.
InstructionSet instruction_set();

// Instructions for products of pairs of bfloat16 numbers.
enum class PairInstructions { NONE, AVX512_BF16, AMX };

// Return the newest of them that this processor has, if the system lets this process use them.
PairInstructions pair_instructions();

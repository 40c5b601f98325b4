// Words for the compiler: how loops become vector instructions.
#pragma once

#include <utility>

#include "instruction_set.h"

#if defined(__GNUC__) || defined(__clang__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define INLINE __attribute__((always_inline))
#define RESTRICT __restrict__
#else
#define ALWAYS_INLINE __forceinline
#define INLINE
#define RESTRICT __restrict
#endif

// INDEPENDENT: no iteration of a loop reads what another one writes. ROLLED: the same for a short loop,
// which GCC would unroll before it makes vectors of its iterations. UNROLLED(n): at most n iterations.
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define INDEPENDENT PRAGMA(clang loop vectorize(assume_safety))
#define ROLLED INDEPENDENT
#define UNROLLED(n) PRAGMA(clang loop unroll(full))
#elif defined(__GNUC__)
#define INDEPENDENT PRAGMA(GCC ivdep)
#define ROLLED PRAGMA(GCC unroll 1) INDEPENDENT
#define UNROLLED(n) PRAGMA(GCC unroll n)
#else
#define INDEPENDENT __pragma(loop(ivdep))
#define ROLLED INDEPENDENT
#define UNROLLED(n)
#endif

#ifdef HAS_TARGETS
template <auto FUNCTION, typename... Arguments>
__attribute__((target("avx2"))) void with_avx2(const Arguments&... arguments) {
  FUNCTION(arguments...);
}

template <auto FUNCTION, typename... Arguments>
__attribute__((target("avx512f"))) void with_avx512(const Arguments&... arguments) {
  FUNCTION(arguments...);
}
#endif

// Call a function that is ALWAYS_INLINE, compiled for the widest vectors of this processor. Products and
// sums are not fused: the results have the same bits on all of them.
template <auto FUNCTION, typename... Arguments>
void vectorized(const Arguments&... arguments) {
#ifdef HAS_TARGETS
  switch (instruction_set()) {
    case InstructionSet::AVX512: return with_avx512<FUNCTION>(arguments...);
    case InstructionSet::AVX2: return with_avx2<FUNCTION>(arguments...);
    default: break;
  }
#endif
  FUNCTION(arguments...);
}

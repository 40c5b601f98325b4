// Words for the compiler: how loops become vector instructions.
#pragma once

#if defined(_MSC_VER)
#define ALWAYS_INLINE __forceinline
#define INLINE
#define RESTRICT __restrict
#define INDEPENDENT __pragma(loop(ivdep))
#define ROLLED INDEPENDENT
#else
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define INLINE __attribute__((always_inline))
#define RESTRICT __restrict__
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define ROLLED INDEPENDENT
#else
#define INDEPENDENT _Pragma("GCC ivdep")
// Keep a short loop, which GCC would unroll before it makes vectors of its iterations.
#define ROLLED _Pragma("GCC unroll 1") INDEPENDENT
#endif
#endif

// Compile a function for several widths of vectors; the processor decides when the library is
// loaded. Elsewhere the function is compiled for the oldest processors of the platform.
#if defined(__GNUC__) && defined(__x86_64__) && defined(__gnu_linux__) && !defined(SANITIZED)
#define MULTIVERSIONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSIONED
#endif

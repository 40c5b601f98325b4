// Include the file LOOPS once for each instruction set, in a namespace of its own: avx2 and avx512.
//
// Products and sums are fused, as in the products of matrices of onnxruntime.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_LOOPS
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#pragma GCC target("avx2,fma,prfchw")
namespace avx2 {
#define LANES 8
#include "vectors.h"

#include LOOPS
#undef LANES
}  // namespace avx2
#pragma GCC target("avx512f,fma,prfchw")
namespace avx512 {
#define LANES 16
#include "vectors.h"

#include LOOPS
#undef LANES
}  // namespace avx512
#pragma GCC pop_options
#endif

#include "tiles.h"

#include <algorithm>
#include <cstring>

namespace tiles {

namespace {

// Products and sums are fused, as in the products of matrices of onnxruntime.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_TILES
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#pragma GCC target("avx2,fma")
namespace avx2 {
#define LANES 8
#include "tile_loops.h"
#undef LANES
}  // namespace avx2
#pragma GCC target("avx512f,fma")
namespace avx512 {
#define LANES 16
#include "tile_loops.h"
#undef LANES
}  // namespace avx512
#pragma GCC pop_options
#endif

}  // namespace

InstructionSet instruction_set() {
#ifdef HAS_TILES
  if (__builtin_cpu_supports("avx512f")) return InstructionSet::AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::AVX2;
#endif
  return InstructionSet::NONE;
}

const Functions& functions_of([[maybe_unused]] InstructionSet instructions) {
#ifdef HAS_TILES
  return instructions == InstructionSet::AVX512 ? avx512::FUNCTIONS : avx2::FUNCTIONS;
#else
  static const Functions none{};
  return none;
#endif
}

int64_t Functions::width_for(int64_t columns, bool are_tall) const {
  int64_t best = 0;
  for (int vectors = 1; vectors <= max_vectors; ++vectors) {
    if (are_tall && rows_of_tile(vectors) < rows_of_tile(1)) break;
    const int64_t width = vectors * lanes;
    if (!best || round_up(columns, width) <= round_up(columns, best)) best = width;
  }
  return best;
}

void Functions::pad(std::vector<int64_t>& rows, int64_t width) const {
  const int64_t tile = rows_of_tile(int(width / lanes));
  rows.resize(size_t(round_up(int64_t(rows.size()), tile)), rows.empty() ? 0 : rows.back());
}

}  // namespace tiles

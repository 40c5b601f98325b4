#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "vectorized.h"

#ifdef HAS_PAIRS
#include <immintrin.h>
#endif

namespace tiles {

namespace {

#define LOOPS "tile_loops.h"
#include "each_instruction_set.h"

#ifdef HAS_PAIRS
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,fma,prfchw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,fma,prfchw")
#endif
namespace avx512_bf16 {
#define LANES 16
#define REGISTERS 32
#define MULTIPLIES_PAIRS
#include "vectors.h"

#include LOOPS
#undef LANES
#undef REGISTERS
}  // namespace avx512_bf16
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

}  // namespace

const Functions& functions_of([[maybe_unused]] InstructionSet instructions) {
#ifdef HAS_LOOPS
  return OF_INSTRUCTION_SET(instructions, OF_FLOATS);
#else
  static const Functions none{};
  return none;
#endif
}

const Functions& pair_functions_of(
    [[maybe_unused]] InstructionSet instructions, [[maybe_unused]] PairInstructions pairs) {
#ifdef HAS_PAIRS
  if (pairs != PairInstructions::NONE) return avx512_bf16::OF_PAIRS;
#endif
#ifdef HAS_LOOPS
  return OF_INSTRUCTION_SET(instructions, OF_PAIRS);
#else
  return functions_of(instructions);
#endif
}

int64_t Functions::width_for(int64_t columns) const {
  int64_t best = 0;
  for (int vectors = 1; vectors <= max_vectors; ++vectors) {
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

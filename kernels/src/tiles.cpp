#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "vectorized.h"

namespace tiles {

namespace {

#define LOOPS "tile_loops.h"
#include "each_instruction_set.h"

}  // namespace

const Functions& functions_of([[maybe_unused]] InstructionSet instructions) {
#ifdef HAS_LOOPS
  return OF_INSTRUCTION_SET(instructions, FUNCTIONS);
#else
  static const Functions none{};
  return none;
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

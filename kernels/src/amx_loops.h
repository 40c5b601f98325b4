// Products of pairs by tiles of 16 rows and columns. TILES has eight of them: the sums of two times two
// tiles, two tiles of a, and two of a panel.
#pragma once

#include "bfloat16.h"

namespace bfloat16 {
namespace {

constexpr int64_t TILE_ROWS = 16;

// Add the products of one tile of rows, or of two.
template <typename TILES, bool HAS_SECOND_ROWS, bool HAS_SECOND_COLUMNS>
inline void add_some_tiles(
    TILES& tiles, const float* a, int64_t pitch, const float* panel, int64_t pairs, float* sums,
    bool are_first) {
  constexpr int64_t in_row = COLUMNS * sizeof(float);
  float* const below = sums + TILE_ROWS * COLUMNS;
  const float* const a_below = a + TILE_ROWS * pitch;
  const int64_t in_row_of_a = pitch * int64_t(sizeof(float));
  if (are_first) {
    tiles.template zero<0>();
    if constexpr (HAS_SECOND_COLUMNS) tiles.template zero<1>();
    if constexpr (HAS_SECOND_ROWS) tiles.template zero<2>();
    if constexpr (HAS_SECOND_ROWS && HAS_SECOND_COLUMNS) tiles.template zero<3>();
  } else {
    tiles.template load<0>(sums, in_row);
    if constexpr (HAS_SECOND_COLUMNS) tiles.template load<1>(sums + PAIRS, in_row);
    if constexpr (HAS_SECOND_ROWS) tiles.template load<2>(below, in_row);
    if constexpr (HAS_SECOND_ROWS && HAS_SECOND_COLUMNS) tiles.template load<3>(below + PAIRS, in_row);
  }
  for (int64_t pair = 0; pair < pairs; pair += PAIRS, panel += PAIRS * COLUMNS) {
    tiles.template load<4>(a + pair, in_row_of_a);
    if constexpr (HAS_SECOND_ROWS) tiles.template load<5>(a_below + pair, in_row_of_a);
    tiles.template load<6>(panel, in_row);
    if constexpr (HAS_SECOND_COLUMNS) tiles.template load<7>(panel + PAIRS, in_row);
    tiles.template add_products<0, 4, 6>();
    if constexpr (HAS_SECOND_COLUMNS) tiles.template add_products<1, 4, 7>();
    if constexpr (HAS_SECOND_ROWS) tiles.template add_products<2, 5, 6>();
    if constexpr (HAS_SECOND_ROWS && HAS_SECOND_COLUMNS) tiles.template add_products<3, 5, 7>();
  }
  tiles.template store<0>(sums, in_row);
  if constexpr (HAS_SECOND_COLUMNS) tiles.template store<1>(sums + PAIRS, in_row);
  if constexpr (HAS_SECOND_ROWS) tiles.template store<2>(below, in_row);
  if constexpr (HAS_SECOND_ROWS && HAS_SECOND_COLUMNS) tiles.template store<3>(below + PAIRS, in_row);
}

// `add` of a Multiplier whose tiles have TILE_ROWS rows.
template <typename TILES>
void add_tiles(
    const float* a, int64_t pitch, int64_t rows, const float* panel, int64_t pairs, int64_t columns,
    float* sums, bool are_first) {
  TILES tiles;
  const bool is_wide = columns > PAIRS;
  for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
    const bool is_high = rows - row > TILE_ROWS;
    const auto add = is_high ? (is_wide ? add_some_tiles<TILES, true, true> : add_some_tiles<TILES, true, false>)
                             : (is_wide ? add_some_tiles<TILES, false, true> : add_some_tiles<TILES, false, false>);
    add(tiles, a + row * pitch, pitch, panel, pairs, sums + row * COLUMNS, are_first);
  }
}

}  // namespace
}  // namespace bfloat16

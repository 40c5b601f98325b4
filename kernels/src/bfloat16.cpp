#include "bfloat16.h"

#include <algorithm>

#include "vectorized.h"

#ifdef HAS_PAIRS
#include <immintrin.h>

namespace bfloat16 {
namespace {

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16")
#endif

constexpr int DOT_ROWS = 12;  // with two vectors of columns, their sums fill the registers
constexpr int LANES = 16;

// Add the products of some rows and vectors of columns: AVX512-BF16 adds the products of a pair of each
// lane to the sum of the lane.
template <int VECTORS>
void add_dots(
    const float* a, int64_t pitch, const float* panel, int64_t pairs, float* sums, bool are_first) {
  __m512 tile[DOT_ROWS][VECTORS];
  UNROLLED(12) for (int row = 0; row < DOT_ROWS; ++row) {
    UNROLLED(2) for (int v = 0; v < VECTORS; ++v) {
      tile[row][v] = are_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * COLUMNS + v * LANES);
    }
  }
  for (int64_t pair = 0; pair < pairs; ++pair, panel += COLUMNS) {
    __m512bh factors[VECTORS];
    UNROLLED(2) for (int v = 0; v < VECTORS; ++v) factors[v] = (__m512bh)_mm512_loadu_ps(panel + v * LANES);
    UNROLLED(12) for (int row = 0; row < DOT_ROWS; ++row) {
      const __m512bh factor = (__m512bh)_mm512_set1_ps(a[row * pitch + pair]);
      UNROLLED(2) for (int v = 0; v < VECTORS; ++v) {
        tile[row][v] = _mm512_dpbf16_ps(tile[row][v], factor, factors[v]);
      }
    }
  }
  UNROLLED(12) for (int row = 0; row < DOT_ROWS; ++row) {
    UNROLLED(2) for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(sums + row * COLUMNS + v * LANES, tile[row][v]);
  }
}

void add_rows_of_dots(
    const float* a, int64_t pitch, int64_t rows, const float* panel, int64_t pairs, int64_t columns,
    float* sums, bool are_first) {
  const auto add = columns > LANES ? add_dots<2> : add_dots<1>;
  for (int64_t row = 0; row < rows; row += DOT_ROWS) {
    add(a + row * pitch, pitch, panel, pairs, sums + row * COLUMNS, are_first);
  }
}

#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,amx-tile,amx-bf16")
#endif

// The tiles of AMX (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).
// The instructions name their tiles by constants.
class HardwareTiles {
 public:
  HardwareTiles() {
    alignas(64) struct {
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } configuration;
    std::fill_n(configuration.bytes, 8, uint16_t(64));
    std::fill_n(configuration.rows, 8, uint8_t(16));
    _tile_loadconfig(&configuration);
  }
  ~HardwareTiles() { _tile_release(); }

#define EACH_TILE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define DO_ZERO(n) if constexpr (TILE == n) _tile_zero(n);
#define DO_LOAD(n) if constexpr (TILE == n) _tile_loadd(n, from, pitch);
#define DO_STORE(n) if constexpr (TILE == n) _tile_stored(n, to, pitch);
  template <int TILE>
  INLINE void zero() { EACH_TILE(DO_ZERO) }
  template <int TILE>
  INLINE void load(const float* from, int64_t pitch) { EACH_TILE(DO_LOAD) }
  template <int TILE>
  INLINE void store(float* to, int64_t pitch) { EACH_TILE(DO_STORE) }
  template <int SUMS, int A, int PANEL>
  INLINE void add_products() {
    if constexpr (SUMS == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (SUMS == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (SUMS == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (SUMS == 3) _tile_dpbf16ps(3, 5, 7);
    static_assert(A == 4 + SUMS / 2 && PANEL == 6 + SUMS % 2);
  }
};

}  // namespace
}  // namespace bfloat16

#include "amx_loops.h"

namespace bfloat16 {
namespace {

void add_hardware_tiles(
    const float* a, int64_t pitch, int64_t rows, const float* panel, int64_t pairs, int64_t columns,
    float* sums, bool are_first) {
  add_tiles<HardwareTiles>(a, pitch, rows, panel, pairs, columns, sums, are_first);
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

constexpr Multiplier DOTS{DOT_ROWS, add_rows_of_dots}, TILES{TILE_ROWS, add_hardware_tiles};

}  // namespace
}  // namespace bfloat16
#endif

namespace bfloat16 {

const Multiplier* multiplier() {
#ifdef HAS_PAIRS
  switch (pair_instructions()) {
    case PairInstructions::AMX: return &TILES;
    case PairInstructions::AVX512_BF16: return &DOTS;
    default: break;
  }
#endif
  return nullptr;
}

}  // namespace bfloat16

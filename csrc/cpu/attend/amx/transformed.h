//     k[c][t] = scale_t sum_j (H + L)[c][j] level[j][t] + mean[c]          H + L: T^-1 s step, in two halves of bf16
//
// Transformed keys (formats/methods/klt.py) by products of tiles. Levels are multiples of a half below 128, which bf16
// has; with both halves, the matrix has 16 bits.
#pragma once

#include "factors.h"

namespace {
namespace amx {

inline int64_t matrix_halves(const Layout& l) { return l.keys == Keys::transformed ? 2 * l.d * l.d : 0; }

// 16 bf16 numbers, widened
inline Floats widened(__m256i halves) { return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }

// constants.backward, [d / 32][d][32], as H and L in its order: each 16 rows are a left factor.
inline void split_matrix(const Layout& l, const Constants& constants, uint16_t* matrix) {
  const int64_t size = l.d * l.d;
  for (int64_t i = 0; i < size; i += PAIRS) {
    const Floats x = load(constants.backward + i), y = load(constants.backward + i + LANES);
    store_rounded(matrix + i, x, y);
    const __m512i high = _mm512_loadu_si512(matrix + i);
    store_rounded(matrix + size + i, x - widened(_mm512_castsi512_si256(high)),
                  y - widened(_mm512_extracti64x4_epi64(high, 1)));
  }
}

// k[c][t] of a slab; `factors` has d * 32 numbers in bf16, `level` as many in float32.
inline void rebuild(const Layout& l, const Constants& constants, const Slab& slab, const uint16_t* matrix,
                    uint16_t* factors, float* level, float* k) {
  using namespace tiles;
  const int d = int(l.d);
  float scale[SLAB], mean[LARGEST_HEAD];
  float32::read_scales(slab.data + l.k_scale, scale);
  float32::slab_mean(l, constants, slab, mean);
  float32::unpack_levels(l, constants, slab, level);
  put_keys(level, d, factors);
  for (int c = 0; c < d; c += 2 * TILE_ROWS) {
    clear<sums(0, 0)>();
    clear<sums(0, 1)>();
    clear<sums(1, 0)>();
    clear<sums(1, 1)>();
    for (int half = 0; half < 2; ++half)
      for (int j = 0; j < d; j += PAIRS) {
        const uint16_t* rows = matrix + half * d * d + j * d + c * PAIRS;
        load_rows<left(0)>(rows, TILE_BYTES);
        load_rows<left(1)>(rows + TILE_NUMBERS, TILE_BYTES);
        load_rows<right(0)>(factors + j / PAIRS * 2 * TILE_NUMBERS, TILE_BYTES);
        load_rows<right(1)>(factors + (j / PAIRS * 2 + 1) * TILE_NUMBERS, TILE_BYTES);
        multiply_add<sums(0, 0), left(0), right(0)>();
        multiply_add<sums(0, 1), left(0), right(1)>();
        multiply_add<sums(1, 0), left(1), right(0)>();
        multiply_add<sums(1, 1), left(1), right(1)>();
      }
    float *upper = k + c * SLAB, *lower = upper + TILE_ROWS * SLAB;
    store_rows<sums(0, 0)>(upper, 4 * SLAB);
    store_rows<sums(0, 1)>(upper + TILE_ROWS, 4 * SLAB);
    store_rows<sums(1, 0)>(lower, 4 * SLAB);
    store_rows<sums(1, 1)>(lower + TILE_ROWS, 4 * SLAB);
  }
  for (int c = 0; c < d; ++c)
    for (int t = 0; t < SLAB; t += LANES) store(k + c * SLAB + t, load(k + c * SLAB + t) * load(scale + t) + mean[c]);
}

}  // namespace amx
}  // namespace

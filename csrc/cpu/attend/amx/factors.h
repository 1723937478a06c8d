//     keys[c / 32][t / 16][c % 32 / 2][t % 16][c % 2]          values[c / 16][t / 2][c % 16][t % 2]
//
// Slabs of any format as right factors of tile products (isa/tiles.h): unpacked to float32, then rounded to bf16, as
// a 16-bit cache is. A tile's row is a pair of channels of 16 tokens, or a pair of tokens of 16 channels.
#pragma once

#include "../../isa/tiles.h"
#include "../float32/many.h"

namespace {
namespace amx {

using namespace kvq;
using float32::Task;
using tiles::PAIRS;
using tiles::TILE_ROWS;

constexpr int TILE_NUMBERS = TILE_ROWS * PAIRS;

// (low[i], high[i]) for i < 16, nearest even
inline void store_pairs(uint16_t* to, Floats low, Floats high) {
  alignas(64) static constexpr uint16_t INTERLEAVED[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(INTERLEAVED), both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}

// x[0..15], then y[0..15]
inline void store_rounded(uint16_t* to, Floats x, Floats y) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
}

// k[c][t] -> keys
inline void put_keys(const float* k, int d, uint16_t* keys) {
  for (int c = 0; c < d; c += 2)
    for (int half = 0; half < 2; ++half) {
      const int tile = c / SLAB * 2 + half, row = c % SLAB / 2;
      const float* from = k + c * SLAB + half * TILE_ROWS;
      store_pairs(keys + tile * TILE_NUMBERS + row * PAIRS, load(from), load(from + SLAB));
    }
}

// v[t][c] -> values. Tokens that are not attended have weight 0 but may be NaN, so they become 0.
inline void put_values(const Slab& slab, const float* v, int d, uint16_t* values) {
  const auto row = [&](int t, int c) { return slab.low <= t && t < slab.high ? load(v + t * d + c) : Floats{}; };
  for (int t = 0; t < SLAB; t += 2)
    for (int c = 0; c < d; c += TILE_ROWS)
      store_pairs(values + c / TILE_ROWS * TILE_NUMBERS + t / 2 * PAIRS, row(t, c), row(t + 1, c));
}

}  // namespace amx
}  // namespace

//     even[r][n] = sum_k<32 bytes[r][k] codes[k][n],  odd[r][n] = sum_k<32 bytes[r][32 + k] codes[32 + k][n]
//
// Products whose sums must stay apart for every 32 channels, or tokens: half of a tile. Each row is there twice, as two
// rows of a left tile: once with zeros in place of its odd halves, once in place of its even ones.
#pragma once

#include "few.h"

namespace {
namespace amx {

inline int rows_of_halves(int rows) { return (rows + 3) / 4 * FEW; }
KVQ_INLINE int row_of_half(int row, int half) { return row / 4 * FEW + half * 4 + row % 4; }

// Four rows [PARTS][4][BYTES] as [2][PARTS][4][BYTES].
template <int BYTES>
inline void split_halves(const int8_t* rows, int8_t* halves) {
  constexpr int COUNT = PARTS * 4 * BYTES;
  constexpr __mmask16 LOW = 0xFF;
  for (int i = 0; i < COUNT; i += TILE_BYTES) {
    const __m512i x = L::load_bytes(rows + i);
    integer::store_bytes(halves + i, _mm512_maskz_mov_epi32(LOW, x));
    integer::store_bytes(halves + COUNT + i, _mm512_maskz_mov_epi32(__mmask16(~LOW), x));
  }
}

}  // namespace amx
}  // namespace

//     C[r][0..31] = sum_c A[r][c] B[c][0..31]
//
// Small float32 matrix products whose right factor lies in the cache.
#pragma once

#include "../layout.h"
#include "vectors.h"

namespace {
namespace float32 {

using kvq::SLAB;

// R rows times C vectors of columns, held in registers.
template <int R, int C, bool ADD>
inline void tile(const float* a, int64_t lda, int64_t depth, const float* b, int64_t ldb, float* c, int64_t ldc) {
  Floats acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) acc[r][v] = ADD ? load(c + r * ldc + v * LANES) : Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    Floats x[C];
    for (int v = 0; v < C; ++v) x[v] = load(b + k * ldb + v * LANES);
    for (int r = 0; r < R; ++r) {
      const Floats s = splat(a[r * lda + k]);
      for (int v = 0; v < C; ++v) acc[r][v] += s * x[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) store(c + r * ldc + v * LANES, acc[r][v]);
}

// As many accumulators as fit in the registers, with 4 rows or, of 32, with 8.
constexpr int TILE_VECTORS = 2;

template <int R, bool ADD>
inline void row_tile(const float* a, int64_t lda, int64_t depth, const float* b, int64_t ldb, float* c, int64_t ldc) {
  for (int v = 0; v < SLAB; v += TILE_VECTORS * LANES)
    tile<R, TILE_VECTORS, ADD>(a, lda, depth, b + v, ldb, c + v, ldc);
}

// C (rows x 32) = or += A (rows x depth) B (depth x 32)
template <bool ADD = false>
inline void multiply(const float* a, int64_t lda, int rows, int64_t depth, const float* b, int64_t ldb, float* c,
                     int64_t ldc) {
  int r = 0;
  if constexpr (LANES == 16)  // 4 rows load more than they multiply
    for (; r + 8 <= rows; r += 8) row_tile<8, ADD>(a + r * lda, lda, depth, b, ldb, c + r * ldc, ldc);
  for (; r + 4 <= rows; r += 4) row_tile<4, ADD>(a + r * lda, lda, depth, b, ldb, c + r * ldc, ldc);
  switch (rows - r) {
    case 3: row_tile<3, ADD>(a + r * lda, lda, depth, b, ldb, c + r * ldc, ldc); break;
    case 2: row_tile<2, ADD>(a + r * lda, lda, depth, b, ldb, c + r * ldc, ldc); break;
    case 1: row_tile<1, ADD>(a + r * lda, lda, depth, b, ldb, c + r * ldc, ldc); break;
    default: break;
  }
}

}  // namespace float32
}  // namespace

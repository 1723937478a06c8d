// Sums over the rows of a chunk, for `fit`.
//
//     gram      sum_k x_k x_k^T        squares   sum_k x_kc^2        largest   max_k |x_kc|
#pragma once

#include "affine.h"

namespace {
namespace float32 {

inline void squares(const float* rows, int count, int64_t d, double* sum) {
  for (int64_t c = 0; c < d; c += 2 * LANES) {
    Floats acc[2] = {};
    for (int k = 0; k < count; ++k)
      for (int v = 0; v < 2; ++v) acc[v] += load(rows + k * d + c + v * LANES) * load(rows + k * d + c + v * LANES);
    for (int v = 0; v < 2; ++v)
      for (int i = 0; i < LANES; ++i) sum[c + v * LANES + i] += double(acc[v][i]);
  }
}

inline void largest_of(const float* rows, int count, int64_t d, float* top) {
  for (int64_t c = 0; c < d; c += 2 * LANES) {
    Floats best[2] = {load(top + c), load(top + c + LANES)};
    for (int k = 0; k < count; ++k)
      for (int v = 0; v < 2; ++v) best[v] = max(best[v], absolute(load(rows + k * d + c + v * LANES)));
    for (int v = 0; v < 2; ++v) store(top + c + v * LANES, best[v]);
  }
}

inline void gram(const float* rows, int count, int64_t d, float* sum) {
  for (int64_t i = 0; i < d; i += 4)
    for (int64_t j = i / SLAB * SLAB; j < d; j += 2 * LANES) {
      Floats acc[4][2] = {};
      for (int k = 0; k < count; ++k) {
        const float* x = rows + k * d;
        const Floats a = load(x + j), b = load(x + j + LANES);
        for (int r = 0; r < 4; ++r) {
          const Floats s = splat(x[i + r]);
          acc[r][0] += s * a;
          acc[r][1] += s * b;
        }
      }
      for (int r = 0; r < 4; ++r)
        for (int v = 0; v < 2; ++v) store(sum + (i + r) * d + j + v * LANES, acc[r][v]);
    }
}

}  // namespace float32
}  // namespace

//     m' = max(m, u max S),  P = 2^(u S - m'),  l = l 2^(m - m') + sum P,  O = O 2^(m - m')     u: Task.unit or 1
//
// The running softmax of a block of slabs (see dispatch/attend_kernels.h).
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

// 2^x for x <= 0, relative error 3e-6 (weights have 15 bits), in some lanes, 0 in the others; 0 far below.
KVQ_INLINE __m512 exp2(__m512 x, __mmask16 lanes = 0xFFFF) {
  const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.5701017e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.59178603e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40247448e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93121815e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99999261e-1f));
  return _mm512_maskz_scalef_ps(lanes, p, n);
}

inline void attended_tokens(const Slab* slabs, int count, __mmask16* masks) {
  for (int s = 0; s < count; ++s) {
    const uint32_t tokens = (~0u >> (SLAB - slabs[s].high)) & (~0u << slabs[s].low);
    masks[2 * s] = __mmask16(tokens);
    masks[2 * s + 1] = __mmask16(tokens >> 16);
  }
}

// R rows; UNIT: scores are still to be multiplied by Task.unit; keep(row, token, weights of 32 tokens). Beyond a shorter
// block's end nothing is attended, so weights are 0.
template <int R, bool UNIT, class Keep>
KVQ_INLINE void softmax_tile(Task& task, int row, const __mmask16* attended, Keep keep) {
  constexpr int WIDTH = BLOCK / 16;
  float* scores = task.scores + row * BLOCK;
  __m512 best[4];
  unroll<4>([&](auto r) KVQ_LAMBDA { best[r] = _mm512_set1_ps(-1e30f); });
  unroll<WIDTH>([&](auto i) KVQ_LAMBDA {
    unroll<R>([&](auto r) KVQ_LAMBDA {
      best[r] = _mm512_mask_max_ps(best[r], attended[i], best[r], _mm512_load_ps(scores + r * BLOCK + i * 16));
    });
  });
  alignas(16) float tops[4], totals[4];
  const __m512 unit = _mm512_set1_ps(task.unit);
  const __m128 found = reduce4<Max>(best);
  _mm_store_ps(tops, UNIT ? _mm_mul_ps(found, _mm512_castps512_ps128(unit)) : found);
  bool rising = false;
  unroll<R>([&](auto r) KVQ_LAMBDA {
    const float old = task.top[row + r];
    rising |= tops[r] > old;
    tops[r] = tops[r] > old ? tops[r] : old;
  });
  __m512 total[4];
  unroll<4>([&](auto r) KVQ_LAMBDA { total[r] = _mm512_setzero_ps(); });
  unroll<R>([&](auto r) KVQ_LAMBDA {
    const __m512 top = _mm512_set1_ps(tops[r]);
    unroll<BLOCK / SLAB>([&](auto s) KVQ_LAMBDA {
      __m512 p[2];
      unroll<2>([&](auto i) KVQ_LAMBDA {
        const __m512 x = _mm512_load_ps(scores + r * BLOCK + s * SLAB + i * 16);
        p[i] = exp2(UNIT ? _mm512_fmsub_ps(x, unit, top) : _mm512_sub_ps(x, top), attended[2 * s + i]);
        total[r] = _mm512_add_ps(total[r], p[i]);
      });
      keep(row + r, s * SLAB, p);
    });
  });
  _mm_store_ps(totals, reduce4<Add>(total));
  if (rising) {
    const int64_t d = task.layout->d;
    for (int r = 0; r < R; ++r) {
      const float fall = task.top[row + r] - tops[r];
      const __m512 shrink = exp2(_mm512_set1_ps(fall < -1000.0f ? -1000.0f : fall));
      task.total[row + r] *= _mm512_cvtss_f32(shrink);
      task.top[row + r] = tops[r];
      for (int64_t c = 0; c < d; c += 16) {
        float* o = task.out + (row + r) * d + c;
        _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), shrink));
      }
    }
  }
  for (int r = 0; r < R; ++r) task.total[row + r] += totals[r];
}

template <bool UNIT, class Keep>
KVQ_INLINE void softmax(Task& task, const Slab* slabs, int count, Keep keep) {
  __mmask16 attended[BLOCK / 16] = {};
  attended_tokens(slabs, count, attended);
  row_tiles(task.rows, [&](auto r, int row) { softmax_tile<decltype(r)::value, UNIT>(task, row, attended, keep); });
}

inline void softmax(Task& task, const Slab* slabs, int count) {
  softmax<false>(task, slabs, count, [&](int row, int token, const __m512(&p)[2]) KVQ_LAMBDA {
    float* to = task.scores + row * BLOCK + token;
    _mm512_store_ps(to, p[0]);
    _mm512_store_ps(to + 16, p[1]);
  });
}

}  // namespace integer
}  // namespace

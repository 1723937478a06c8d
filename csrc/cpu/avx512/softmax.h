// The running softmax of a block (formulas in kernel.h).
#pragma once

#include "../kernel.h"
#include "lanes.h"

namespace {
namespace avx512 {

using namespace kvq;

inline void softmax(Task& task, const Slab* slabs, int count) {
  const int width = count * SLAB;
  const int64_t d = task.layout->d;
  __mmask16 attended[BLOCK / 16];
  for (int i = 0; i < width / 16; ++i) {
    const Slab& s = slabs[i / 2];
    attended[i] = __mmask16(((~0u >> (SLAB - s.high)) & (~0u << s.low)) >> (i % 2 * 16));
  }
  const __m512 hidden = _mm512_set1_ps(-1e30f);
  for (int r = 0; r < task.rows; ++r) {
    float* scores = task.scores + r * BLOCK;
    __m512 best = hidden;
    for (int i = 0; i < width / 16; ++i)
      best = _mm512_mask_max_ps(best, attended[i], best, _mm512_load_ps(scores + i * 16));
    const float block_top = _mm512_reduce_max_ps(best), old = task.top[r], top = block_top > old ? block_top : old;
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < width / 16; ++i) {
      const __m512 p = exp2(_mm512_sub_ps(_mm512_load_ps(scores + i * 16), _mm512_set1_ps(top)));
      const __m512 shown = _mm512_maskz_mov_ps(attended[i], p);
      _mm512_store_ps(scores + i * 16, shown);
      total = _mm512_add_ps(total, shown);
    }
    if (count % 2) {  // kernels make weights 64 at a time
      _mm512_store_ps(scores + width, _mm512_setzero_ps());
      _mm512_store_ps(scores + width + 16, _mm512_setzero_ps());
    }
    task.top[r] = top;
    if (top == old) {
      task.total[r] += _mm512_reduce_add_ps(total);
      continue;
    }
    const __m512 shrink = exp2(_mm512_set1_ps(old - top < -1000.0f ? -1000.0f : old - top));
    task.total[r] = task.total[r] * _mm512_cvtss_f32(shrink) + _mm512_reduce_add_ps(total);
    for (int64_t c = 0; c < d; c += 16) {
      float* o = task.out + r * d + c;
      _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), shrink));
    }
  }
}

}  // namespace avx512
}  // namespace

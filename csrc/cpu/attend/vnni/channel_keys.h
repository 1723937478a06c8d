// SQuat and KIVI keys: one scale and zero per channel and slab.
//
//     q . k_t = sum_c (q_c scale_c) code_ct + sum_c q_c zero_c
//
// The scales go into the query once per slab, which then becomes fixed point; the zeros make one number per row.
#pragma once

#include "dot_keys.h"

namespace {
namespace vnni {

template <int D, int BITS>
struct ChannelKeys {
  static constexpr int PARTS = 2, LINES = 3;  // per quad: about half a slab

  struct Work {
    alignas(64) int8_t q8[PARTS * 4 * D];
    float step[4], offset[4];  // of a tile's rows: score = step * integer + offset
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static void begin(Task&) {}

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    const uint8_t *codes = slab.data + l.k_codes, *scale = slab.data + l.k_scale, *zero = slab.data + l.k_zero;
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      fold<R>(task.query + row * D, scale, zero, work);
      __m512 s[R][2];
      dot_keys<D, BITS, PARTS, R, LINES>(codes, work.q8, task.prefetch, s);
      unroll<R>([&](auto i) KVQ_LAMBDA {
        float* to = task.scores + (row + i) * BLOCK + column;
        const __m512 step = _mm512_set1_ps(work.step[i]), offset = _mm512_set1_ps(work.offset[i]);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(s[i][0], step, offset));
        _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(s[i][1], step, offset));
      });
    });
  }

  template <int R>
  KVQ_INLINE static void fold(const float* query, const uint8_t* scale, const uint8_t* zero, Work& work) {
    __m512 largest[4], zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = zeros[r] = _mm512_setzero_ps(); });
    for (int c = 0; c < D; c += 16) {
      const __m512 s = load_halves(scale + 2 * c), z = load_halves(zero + 2 * c);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512 q = _mm512_loadu_ps(query + r * D + c);
        largest[r] = max_abs(largest[r], _mm512_mul_ps(q, s));
        zeros[r] = _mm512_fmadd_ps(q, z, zeros[r]);
      });
    }
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float inverse[4];
    _mm_store_ps(inverse, _mm_div_ps(_mm_set1_ps(RANGE<PARTS>), top));
    _mm_storeu_ps(work.step, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE<PARTS>)));
    _mm_storeu_ps(work.offset, reduce4<Add>(zeros));
    for (int c = 0; c < D; c += 64) {
      __m512 s[4];
      unroll<4>([&](auto v) KVQ_LAMBDA { s[v] = load_halves(scale + 2 * (c + 16 * v)); });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512 factor = _mm512_set1_ps(inverse[r]), magic = _mm512_set1_ps(MAGIC<PARTS>);
        __m512 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m512 q = _mm512_loadu_ps(query + r * D + c + 16 * v);
          x[v] = _mm512_fmadd_ps(_mm512_mul_ps(q, s[v]), factor, magic);
        });
        pack4<PARTS>(x, work.q8 + r * D + c, work.q8 + (R + r) * D + c);
      });
    }
  }
};

}  // namespace vnni
}  // namespace

// SQuat and KIVI keys: one scale and zero per channel and slab.
//
//     q . k_t = sum_c (q_c scale_c) code_ct + sum_c q_c zero_c
//
// The scales go into the query once per slab, which then becomes fixed point; the zeros make one number per row.
#pragma once

#include "dot_keys.h"

namespace {
namespace avx2 {

template <int D, int BITS>
struct ChannelKeys {
  static constexpr int PARTS = 2;

  struct Work {
    alignas(32) int8_t q8[PARTS * 4 * D];
    float step[4], offset[4];  // of a tile's rows: score = step * integer + offset
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static void begin(Task&) {}

  static void score(Task& task, const Slab& slab, int column) {
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row); });
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    fold<R>(task.query + row * D, slab.data + l.key_at[1], slab.data + l.key_at[2], work);
    float* scores = task.scores + row * BLOCK + column;
    const auto finish = [&](auto r, int token, __m256 s) KVQ_LAMBDA {
      const __m256 step = _mm256_set1_ps(work.step[r]), offset = _mm256_set1_ps(work.offset[r]);
      _mm256_storeu_ps(scores + r * BLOCK + token, _mm256_fmadd_ps(s, step, offset));
    };
    dot_keys<D, BITS, PARTS, R>(slab.data + l.key_at[0], work.q8, task.prefetch, finish);
  }

  template <int R>
  KVQ_INLINE static void fold(const float* query, const uint8_t* scale, const uint8_t* zero, Work& work) {
    __m256 largest[4], zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = zeros[r] = _mm256_setzero_ps(); });
    for (int c = 0; c < D; c += 8) {
      const __m256 s = load_halves(scale + 2 * c), z = load_halves(zero + 2 * c);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m256 q = _mm256_loadu_ps(query + r * D + c);
        largest[r] = _mm256_max_ps(largest[r], absolute(_mm256_mul_ps(q, s)));
        zeros[r] = _mm256_fmadd_ps(q, z, zeros[r]);
      });
    }
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE<PARTS>), top));
    _mm_storeu_ps(work.step, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE<PARTS>)));
    _mm_storeu_ps(work.offset, reduce4<Add>(zeros));
    for (int c = 0; c < D; c += 32) {
      __m256 s[4];
      unroll<4>([&](auto v) KVQ_LAMBDA { s[v] = load_halves(scale + 2 * (c + 8 * v)); });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m256 factor = _mm256_set1_ps(factors[r]);
        __m256 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m256 q = _mm256_loadu_ps(query + r * D + c + 8 * v);
          x[v] = _mm256_mul_ps(_mm256_mul_ps(q, s[v]), factor);
        });
        pack32(x, work.q8 + r * D + c, work.q8 + (R + r) * D + c);
      });
    }
  }
};

}  // namespace avx2
}  // namespace

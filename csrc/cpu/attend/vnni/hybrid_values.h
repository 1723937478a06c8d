//     sum_t p_t v_tc = |scale_c| sum_t p_t u_tc + zero_c sum_t p_t         per slab
//
// InnerQ's values with 2 bits (formats/methods/innerq.py): per channel and slab a scale, and either a zero or 32 sign bits; u
// as in integer/hybrid_keys.h. The sums stay in registers over all slabs of a block.
//
// This kernel has a twin in ../avx2. As one source, g++ 12 spilled the sums of the VNNI kernel: innerq2 rose from 0.455
// to 0.482 instructions per cached element with 4 query heads.
#pragma once

#include "../integer/hybrid_keys.h"
#include "softmax.h"

namespace {
namespace integer {

struct HybridValues2 {
  struct Work {
    alignas(64) int8_t weights[PARTS][4][BLOCK];
    float step[4], sum[BLOCK_SLABS][4];  // of a tile's rows: fixed-point unit, sum of a slab's weights in it
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void add(Task& task, const Slab* slabs, int count) {
    Work& work = *reinterpret_cast<Work*>(task.value_work);
    const Layout& l = *task.layout;
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      weigh<R>(task.scores + row * BLOCK, count, work.weights, work.step, work.sum);
      by_stride<2>(l.d, [&](auto stride) KVQ_LAMBDA {
        for (int c = 0; c < l.d; c += 32)
          multiply<R>(l, stride, slabs, count, c, work, task.prefetch, task.out + row * l.d + c);
      });
    });
  }

  // `step` has 4 numbers, `sum` those of BLOCK_SLABS.
  template <int R>
  KVQ_INLINE static void weigh(const float* p, int count, int8_t (&weights)[PARTS][4][BLOCK], float* step, float (*sum)[4]) {
    __m512 largest[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = _mm512_setzero_ps(); });
    for (int t = 0; t < count * SLAB; t += 16)
      unroll<R>([&](auto r) KVQ_LAMBDA { largest[r] = _mm512_max_ps(largest[r], _mm512_load_ps(p + r * BLOCK + t)); });
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    _mm_storeu_ps(step, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE)));
    for (int t = 0; t < count * SLAB; t += 64) {
      const __m512 magic = _mm512_set1_ps(MAGIC);
      __m512 first[4], second[4];  // sums of the rounded weights (see HybridKeys2::prepare) of two slabs
      unroll<4>([&](auto r) KVQ_LAMBDA { first[r] = second[r] = _mm512_setzero_ps(); });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        __m512 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m512 weight = _mm512_load_ps(p + r * BLOCK + t + 16 * v);
          x[v] = _mm512_fmadd_ps(weight, _mm512_set1_ps(factors[r]), magic);
        });
        pack(x, weights[0][r] + t, weights[1][r] + t);
        first[r] = _mm512_add_ps(_mm512_sub_ps(x[0], magic), _mm512_sub_ps(x[1], magic));
        second[r] = _mm512_add_ps(_mm512_sub_ps(x[2], magic), _mm512_sub_ps(x[3], magic));
      });
      _mm_storeu_ps(sum[t / SLAB], reduce4<Add>(first));
      _mm_storeu_ps(sum[t / SLAB + 1], reduce4<Add>(second));
    }
  }

  // 32 channels from c on, R rows; stride: channels of a plane
  template <int R, class Stride>
  static __attribute__((noinline)) void multiply(const Layout& l, Stride stride, const Slab* slabs, int count, unsigned c,
                                                 Work& work, Prefetch& prefetch, float* out) {
    const __m512i by0 = planes(c, stride, 2), by1 = planes(c + 16, stride, 2);
    __m512 total[R][2];  // in units of `step`
    unroll<R>([&](auto r) KVQ_LAMBDA { total[r][0] = total[r][1] = _mm512_setzero_ps(); });
    for (int s = 0; s < count; ++s) {
      const uint8_t *data = slabs[s].data, *codes = data + l.v_codes;
      const uint8_t *w0 = codes + c % stride * 4, *w1 = codes + (c + 16) % stride * 4;
      HybridParameters low, high;
      low.read(data + l.v_scale + 2 * c, data + l.v_slot + 4 * c);
      high.read(data + l.v_scale + 2 * c + 32, data + l.v_slot + 4 * c + 64);
      const int8_t* weights = work.weights[0][0] + s * SLAB;
      const char* ahead = prefetch.take<SLAB / 4>();
      __m512i sums[CHAINS<R>][R * PARTS][2];
      auto& acc = sums[0];
      unroll<CHAINS<R>>([&](auto chain) KVQ_LAMBDA {
        unroll<R * PARTS>([&](auto x) KVQ_LAMBDA { sums[chain][x][0] = sums[chain][x][1] = _mm512_setzero_si512(); });
      });
      unroll<SLAB / 4>([&](auto e) KVQ_LAMBDA {
        const __m512i c0 = hybrid_codes<e>(_mm512_srlv_epi32(load_words(w0 + e * stride * 4, c, stride), by0), low.signs);
        const __m512i c1 = hybrid_codes<e>(_mm512_srlv_epi32(load_words(w1 + e * stride * 4, c + 16, stride), by1), high.signs);
        __builtin_prefetch(ahead + 64 * e, 0, 3);
        unroll<R * PARTS>([&](auto x) KVQ_LAMBDA {
          constexpr int part = x / R, r = x % R;
          const __m512i b = quad(weights + (part * 4 + r) * BLOCK + e * 4);
          dot(sums[e % CHAINS<R>][x][0], c0, b);
          dot(sums[e % CHAINS<R>][x][1], c1, b);
        });
      });
      add_chains(sums);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512 sum = _mm512_set1_ps(work.sum[s][r]);
        const auto add = [&](int half, const HybridParameters& p) KVQ_LAMBDA {
          const __m512 zeros = _mm512_fmadd_ps(p.zero, sum, total[r][half]);
          total[r][half] = _mm512_fmadd_ps(to_reals(join(acc[r][half], acc[R + r][half])), p.scale, zeros);
        };
        add(0, low);
        add(1, high);
      });
    }
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m512 step = _mm512_set1_ps(work.step[r]);
      for (int half = 0; half < 2; ++half) {
        float* to = out + r * l.d + half * 16;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(total[r][half], step, _mm512_loadu_ps(to)));
      }
    });
  }
};

}  // namespace integer
}  // namespace

//     sum_t p_t v_tc = |scale_c| sum_t p_t u_tc + zero_c sum_t p_t         per slab
//
// InnerQ's values with 2 bits (formats/methods/innerq.py): per channel and slab a scale, and either a zero or 32 sign bits; u
// as in integer/hybrid_keys.h. Each slab is added to the output: AVX2 has no registers for its sums over slabs.
//
// This kernel has a twin in ../vnni. As one source, g++ 12 spilled the sums of the VNNI kernel: innerq2 rose from 0.455
// to 0.482 instructions per cached element with 4 query heads.
#pragma once

#include "../integer/hybrid_keys.h"

namespace {
namespace integer {

struct HybridValues2 {
  struct Work {
    alignas(64) int8_t weights[PARTS][4][BLOCK];
    float step[4], sum[BLOCK_SLABS][4];  // of a tile's rows: fixed-point unit, sum of a slab's weights
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void add(Task& task, const Slab* slabs, int count) {
    Work& work = *reinterpret_cast<Work*>(task.value_work);
    const Layout& l = *task.layout;
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      weigh<R>(task.scores + row * BLOCK, count, work);
      by_stride<2>(l.d, [&](auto stride) KVQ_LAMBDA {
        for (int s = 0; s < count; ++s)
          for (int c = 0; c < l.d; c += WIDTH * VECTORS<R * PARTS>)
            multiply<R>(l, stride, slabs[s], s, c, work, task.prefetch, task.out + row * l.d + c);
      });
    });
  }

  template <int R>
  KVQ_INLINE static void weigh(const float* p, int count, Work& work) {
    Reals largest[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = Reals{}; });
    for (int t = 0; t < count * SLAB; t += WIDTH)
      unroll<R>([&](auto r) KVQ_LAMBDA { largest[r] = maximum(largest[r], L::load(p + r * BLOCK + t)); });
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    const __m128 step = _mm_mul_ps(top, _mm_set1_ps(1 / RANGE));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    _mm_storeu_ps(work.step, step);
    for (int t = 0; t < count * SLAB; t += SLAB) {
      Reals sums[4];  // of the rounded weights (see HybridKeys2::prepare)
      unroll<4>([&](auto r) KVQ_LAMBDA { sums[r] = Reals{}; });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        Reals x[PER_SLAB];
        unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA {
          x[v] = L::load(p + r * BLOCK + t + WIDTH * v) * L::all(factors[r]);
          sums[r] = sums[r] + integer_of(x[v]);
        });
        pack(x, work.weights[0][r] + t, work.weights[1][r] + t);
      });
      _mm_storeu_ps(work.sum[t / SLAB], _mm_mul_ps(step, reduce4<Add>(sums)));
    }
  }

  // WIDTH T channels from c on, R rows, one slab; stride: channels of a plane
  template <int R, class Stride>
  static __attribute__((noinline)) void multiply(const Layout& l, Stride stride, const Slab& slab, int s, unsigned c,
                                                 Work& work, Prefetch& prefetch, float* out) {
    constexpr int X = R * PARTS, T = VECTORS<X>;
    const uint8_t* codes[T];
    Ints shift[T], acc[X][T];
    HybridParameters p[T];
    unroll<T>([&](auto t) KVQ_LAMBDA {
      const unsigned at = c + WIDTH * t;
      codes[t] = slab.data + l.v_codes + at % stride * 4;
      shift[t] = planes(at, stride, 2);
      p[t].read(slab.data + l.v_scale + 2 * at, slab.data + l.v_slot + 4 * at);
      unroll<X>([&](auto x) KVQ_LAMBDA { acc[x][t] = Ints{}; });
    });
    const int8_t* weights = work.weights[0][0] + s * SLAB;
    const char* ahead = prefetch.take<2>();
    unroll<SLAB / 4>([&](auto e) KVQ_LAMBDA {
      Ints code[T];
      unroll<T>([&](auto t) KVQ_LAMBDA {
        code[t] = hybrid_codes<e>(shift_right(load_words(codes[t] + e * stride * 4, c + WIDTH * t, stride), shift[t]), p[t].signs);
      });
      if (e % 4 == 0) __builtin_prefetch(ahead + e / 4 * 64, 0, 3);
      unroll<X>([&](auto x) KVQ_LAMBDA {
        constexpr int part = x / R, r = x % R;
        const Ints b = quad(weights + (part * 4 + r) * BLOCK + e * 4);
        unroll<T>([&](auto t) KVQ_LAMBDA { dot(acc[x][t], code[t], b); });
      });
    });
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const Reals step = L::all(work.step[r]), sum = L::all(work.sum[s][r]);
      unroll<T>([&](auto t) KVQ_LAMBDA {
        float* to = out + r * l.d + WIDTH * t;
        const Reals zeros = fmadd(p[t].zero, sum, L::load(to));
        const Reals x = to_reals(join(acc[r][t], acc[R + r][t]));
        store(to, fmadd(x, p[t].scale * step, zeros));
      });
    });
  }
};

}  // namespace integer
}  // namespace

//     q . k_t = sum_c (q_c scale_c) code_ct + sum_c q_c zero_c
//
// SQuat's and KIVI's keys (formats/methods/squat.py): one scale and one zero per channel and slab. The scales are multiplied
// into the query once per slab, which is then rounded to fixed point; the zeros add up to one number per row.
#pragma once

#include "dot_keys.h"

namespace {
namespace integer {

template <int D, int BITS>
struct ChannelKeys {
  static constexpr int ROW = D, PLANE = D * BITS / 8, CODE_BITS = BITS;
  static int words(const Layout&) { return PLANE / 4; }

  struct Folded {  // nothing: channels stay where they are
    void begin() {}
    void find(const Layout&, const Slab&) {}
  };

  struct Work {
    alignas(64) int8_t q8[PARTS * 4 * D];
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
    Folded folded;
    fold<R>(task.query + row * D, l, slab, folded, work.q8, work.q8 + R * D, work.step, work.offset);
    float* scores = task.scores + row * BLOCK + column;
    const auto finish = [&](auto r, int token, Reals s) KVQ_LAMBDA {
      const Reals step = L::all(work.step[r]), offset = L::all(work.offset[r]);
      store(scores + r * BLOCK + token, fmadd(s, step, offset));
    };
    dot_keys<D, BITS, R>(slab.data + l.k_codes, work.q8, task.prefetch, finish);
  }

  // R rows of bytes from hi and from lo on, and 4 numbers of step and offset.
  template <int R>
  KVQ_INLINE static void fold(const float* query, const Layout& l, const Slab& slab, Folded&, int8_t* hi, int8_t* lo,
                              float* step, float* offset) {
    const uint8_t *scale = slab.data + l.k_scale, *zero = slab.data + l.k_zero;
    Reals largest[4], zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = zeros[r] = Reals{}; });
    for (int c = 0; c < D; c += WIDTH) {
      const Reals s = L::load_halves(scale + 2 * c), z = L::load_halves(zero + 2 * c);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const Reals q = L::load(query + r * D + c);
        largest[r] = max_abs(largest[r], q * s);
        zeros[r] = fmadd(q, z, zeros[r]);
      });
    }
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    _mm_storeu_ps(step, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE)));
    _mm_storeu_ps(offset, reduce4<Add>(zeros));
    for (int first = 0; first < D; first += PACK) {
      const int c = whole_pack<D>(first);
      Reals s[PACK / WIDTH];
      unroll<PACK / WIDTH>([&](auto v) KVQ_LAMBDA { s[v] = L::load_halves(scale + 2 * (c + WIDTH * v)); });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const Reals factor = L::all(factors[r]);
        Reals x[PACK / WIDTH];
        unroll<PACK / WIDTH>([&](auto v) KVQ_LAMBDA {
          const Reals q = L::load(query + r * D + c + WIDTH * v);
          x[v] = fixed(q * s[v], factor);
        });
        pack(x, hi + r * D + c, lo + r * D + c);
      });
    }
  }
};

}  // namespace integer
}  // namespace

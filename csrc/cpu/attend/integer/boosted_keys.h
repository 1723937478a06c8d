//     q . k_t = sum_c (q_c |scale_c|) low_ct + sum_b (4 q_b |scale_b|) high_bt + sum_c q_c zero_c       b: the boosted
//
// Kitty's keys (formats/methods/kitty.py). The high digits follow the low ones in separate planes, so both are the words
// of one product (dot_keys.h) with a row that has the plane of the low digits and then that of the high ones, four
// times. They share a fixed-point unit: four steps of a boosted channel are about one step of 2 bits.
#pragma once

#include "../../boosted.h"
#include "dot_keys.h"

namespace {
namespace integer {

template <int D>
struct BoostedKeys {
  static constexpr int LOW = D / 4, PLANE = LOW + D / 8;  // half of the channels may be boosted
  static constexpr int ROW = (4 * PLANE + PACK - 1) / PACK * PACK;
  static constexpr int CODE_BITS = 2;
  static int words(const Layout& l) { return int(D + l.boosted) / 16; }
  static constexpr int CHUNK = SUMS<2> / 4;  // words between two widenings
  KVQ_INLINE static int place(int c) { return c / LOW * PLANE + c % LOW; }  // of a channel's low digit

  struct Folded {
    alignas(64) float of[4][ROW];  // what lies between the planes stays 0
    int32_t from[D];               // of a boosted channel: its place in a row of `of`

    void begin() { std::memset(of, 0, sizeof of); }
    void find(const Layout& l, const Slab& slab) {
      boosted_channels(slab.data + l.k_scale, D, int(l.boosted), from);
      for (int i = 0; i < l.boosted; ++i) from[i] = place(from[i]);
    }
  };

  struct Work {
    alignas(64) int8_t q8[PARTS * 4 * ROW];
    Folded folded;
    float step[4], offset[4];  // of a tile's rows: score = step * integer + offset
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static void begin(Task& task) { reinterpret_cast<Work*>(task.key_work)->folded.begin(); }

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    work.folded.find(*task.layout, slab);
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, Work& work) {
    const Layout& l = *task.layout;
    const int count = words(l);
    fold<R>(task.query + row * D, l, slab, work.folded, work.q8, work.q8 + R * ROW, work.step, work.offset);
    float* scores = task.scores + row * BLOCK + column;
    const auto finish = [&](auto r, int token, Reals s) KVQ_LAMBDA {
      const Reals step = L::all(work.step[r]), offset = L::all(work.offset[r]);
      store(scores + r * BLOCK + token, fmadd(s, step, offset));
    };
    dot_words<ROW, PLANE, 2, R>(slab.data + l.k_codes, count, count < CHUNK ? count : CHUNK, work.q8, task.prefetch,
                                finish);
  }

  template <int R>
  KVQ_INLINE static void fold(const float* query, const Layout& l, const Slab& slab, Folded& folded, int8_t* hi, int8_t* lo,
                              float* step, float* offset) {
    const uint8_t *scale = slab.data + l.k_scale, *zero = slab.data + l.k_zero;
    Reals largest[4], zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = zeros[r] = Reals{}; });
    constexpr bool WHOLE = LOW % WIDTH == 0;  // planes are whole vectors
    constexpr int RUN = WHOLE ? LOW : D;
    for (int first = 0; first < D; first += RUN)
      for (int i = 0; i < RUN; i += WIDTH) {
        const int c = first + i;
        const Reals s = absolute(L::load_halves(scale + 2 * c)), z = L::load_halves(zero + 2 * c);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const Reals q = L::load(query + r * D + c);
          if constexpr (WHOLE)
            store(folded.of[r] + place(first) + i, q * s);
          else
            store_halves(folded.of[r] + place(c), folded.of[r] + place(c + WIDTH / 2), q * s);
          zeros[r] = fmadd(q, z, zeros[r]);
        });
      }
    const int high = int(l.boosted) / 4;
    for (int plane = 0; plane < 4; ++plane)
      for (int i = 0; i < high; ++i) {
        const int from = folded.from[plane * high + i], to = plane * PLANE + LOW + i;
        unroll<R>([&](auto r) KVQ_LAMBDA { folded.of[r][to] = 4 * folded.of[r][from]; });
      }
    for (int i = 0; i < ROW; i += WIDTH)
      unroll<R>([&](auto r) KVQ_LAMBDA { largest[r] = max_abs(largest[r], L::load(folded.of[r] + i)); });
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    _mm_storeu_ps(step, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE)));
    _mm_storeu_ps(offset, reduce4<Add>(zeros));
    for (int i = 0; i < ROW; i += PACK)
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const Reals factor = L::all(factors[r]);
        Reals x[PACK / WIDTH];
        unroll<PACK / WIDTH>([&](auto v) KVQ_LAMBDA {
          x[v] = fixed(L::load(folded.of[r] + i + WIDTH * v), factor);
        });
        pack(x, hi + r * ROW + i, lo + r * ROW + i);
      });
  }
};

}  // namespace integer
}  // namespace

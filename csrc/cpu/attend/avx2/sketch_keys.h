//     q . k_t = c/m |k_in| <f, bits> + c'/m' |k_out| <f', bits'>,   f = S q - S_out q_out,  f' = S' q_out
//
// QJL's keys (formats/methods/qjl.py): sign bits of a sketch, with features of the query in fixed point (sign_sums.h). Every
// slab names its outlier channels. f is recomputed when they change, which is rare: those of a request are chosen
// once.
#pragma once

#include "sign_sums.h"

namespace {
namespace integer {

template <int D>
struct SketchKeys {
  static constexpr int M = 2 * D, OUTER = D, MOST = 32;

  struct Work {
    SignSums<M> inner;
    SignSums<OUTER> outer;
    alignas(64) float made[4][M];  // features of a tile
    uint8_t index[MOST];
    bool prepared;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) { reinterpret_cast<Work*>(task.key_work)->prepared = false; }

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    const uint8_t* index = slab.data + l.ko_index;
    if (!work.prepared || std::memcmp(work.index, index, l.outliers)) {
      row_tiles(task.rows, [&](auto r, int row) { prepare<decltype(r)::value>(task, index, row, work); });
      std::memcpy(work.index, index, l.outliers);
      work.prepared = true;
    }
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  // f and f' of R rows for a slab's outlier channels
  template <int R>
  static __attribute__((noinline)) void prepare(const Task& task, const uint8_t* index, int row, Work& work) {
    const Constants& constants = *task.constants;
    const int outliers = int(task.layout->outliers);
    const float *column[MOST], *outer[MOST];
    float q[4][MOST];
    for (int i = 0; i < outliers; ++i) {
      const int c = index[i] % D;  // a damaged page must not lead out of the sketch
      column[i] = constants.sketch + c * M;
      outer[i] = constants.outer + i * OUTER;
      for (int r = 0; r < R; ++r) q[r][i] = task.query[(row + r) * D + c];
    }
    // clang-format off
    make<M, R>(column, q, outliers, [&](int r, int j, Reals sum) KVQ_LAMBDA {
      return L::load(task.features + (row + r) * M + j) - sum;
    }, work);
    // clang-format on
    for (int r = 0; r < R; ++r) work.inner.fill(row + r, work.made[r]);
    if (!outliers) return;
    make<OUTER, R>(outer, q, outliers, [](int, int, Reals sum) KVQ_LAMBDA { return sum; }, work);
    for (int r = 0; r < R; ++r) work.outer.fill(row + r, work.made[r]);
  }

  // made = finish(r, j, sum_i q_i column_i)
  template <int N, int R, class Finish>
  KVQ_INLINE static void make(const float* const* column, const float (*q)[MOST], int count, Finish finish,
                              Work& work) {
    for (int j = 0; j < N; j += 2 * WIDTH) {
      Reals acc[R][2];
      clear(acc);
      for (int i = 0; i < count; ++i) {
        const Reals a = L::load(column[i] + j), b = L::load(column[i] + j + WIDTH);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const Reals x = L::all(q[r][i]);
          acc[r][0] = fmadd(a, x, acc[r][0]);
          acc[r][1] = fmadd(b, x, acc[r][1]);
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        store(work.made[r] + j, finish(r, j, acc[r][0]));
        store(work.made[r] + j + WIDTH, finish(r, j + WIDTH, acc[r][1]));
      });
    }
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    const Layout& l = *task.layout;
    const Constants& constants = *task.constants;
    float* scores = task.scores + row * BLOCK + column;
    Reals inner[R][PER_SLAB], outer[R][PER_SLAB];
    work.inner.template add<R>(slab.data + l.k_bits, row, task.prefetch, inner);
    if (l.outliers) work.outer.template add<R>(slab.data + l.ko_bits, row, task.prefetch, outer);
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const Reals step = L::all(work.inner.step[row + r] * constants.sketch_scale);
      const Reals outer_step = L::all(work.outer.step[row + r] * constants.outer_scale);
      unroll<PER_SLAB>([&](auto t) KVQ_LAMBDA {
        constexpr int token = WIDTH * t;
        Reals score = inner[r][t] * step * L::load_halves(slab.data + l.k_norm + 2 * token);
        if (l.outliers)
          score = fmadd(outer[r][t] * outer_step, L::load_halves(slab.data + l.ko_norm + 2 * token), score);
        store(scores + r * BLOCK + token, score);
      });
    });
  }
};

}  // namespace integer
}  // namespace

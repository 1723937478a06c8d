//     q . k_t = c/m |k_in| <f, bits> + c'/m' |k_out| <f', bits'>,   f = S q - S_out q_out,  f' = S' q_out
//
// QJL's keys (formats/methods/qjl.py): sign bits of a sketch, with tables of the query's features (`Sums`, in sign_sums.h of
// the instruction set). Every slab names its outlier channels. f is recomputed when they change, which is rare: those of
// a request are chosen once.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

template <class Sums>
struct SketchKeys {
  static constexpr int MOST = 32;  // outlier channels

  struct Work {
    Sums inner, outer;
    float* made;  // features of a tile, [4][signs]
    uint8_t index[MOST];
    bool prepared;
  };

  static size_t work_bytes(const Layout& l) {
    const size_t made = 4 * sizeof(float) * size_t(l.sketch_rows > l.outer_rows ? l.sketch_rows : l.outer_rows);
    return align64(sizeof(Work)) + Sums::bytes(l.sketch_rows) + Sums::bytes(l.outer_rows) + made;
  }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    char* at = work.inner.place(l.sketch_rows, task.key_work + align64(sizeof(Work)));
    work.made = reinterpret_cast<float*>(work.outer.place(l.outer_rows, at));
    work.prepared = false;
  }

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
    const Layout& l = *task.layout;
    const int outliers = int(l.outliers), inner_signs = int(l.sketch_rows), outer_signs = int(l.outer_rows);
    const float *column[MOST], *outer[MOST];
    float q[4][MOST];
    for (int i = 0; i < outliers; ++i) {
      const int c = index[i] % int(l.d);  // a damaged page must not lead out of the sketch
      column[i] = constants.sketch + c * inner_signs;
      outer[i] = constants.outer + i * outer_signs;
      for (int r = 0; r < R; ++r) q[r][i] = task.query[(row + r) * l.d + c];
    }
    // clang-format off
    make<R>(column, q, outliers, inner_signs, [&](int r, int j, Reals sum) KVQ_LAMBDA {
      return L::load(task.features + (row + r) * inner_signs + j) - sum;
    }, work.made);
    // clang-format on
    for (int r = 0; r < R; ++r) work.inner.fill(row + r, work.made + r * inner_signs);
    if (!outliers) return;
    make<R>(outer, q, outliers, outer_signs, [](int, int, Reals sum) KVQ_LAMBDA { return sum; }, work.made);
    for (int r = 0; r < R; ++r) work.outer.fill(row + r, work.made + r * outer_signs);
  }

  // made = finish(r, j, sum_i q_i column_i)
  template <int R, class Finish>
  KVQ_INLINE static void make(const float* const* column, const float (*q)[MOST], int count, int signs, Finish finish,
                              float* made) {
    for (int j = 0; j < signs; j += 2 * WIDTH) {
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
        store(made + r * signs + j, finish(r, j, acc[r][0]));
        store(made + r * signs + j + WIDTH, finish(r, j + WIDTH, acc[r][1]));
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

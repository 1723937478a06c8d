//     q . k_t = scale_t ( sum_i f_i code_it + f_n ) + f_n+1            f = F q, once per step
//
// Transformed keys (formats/klt.py): one scale per token, so a query's features are the same for all slabs and are
// rounded to fixed point once per task. n slots in four planes; PLANE is the room for one, so that all offsets are
// constants.
#pragma once

#include "dot_keys.h"

namespace {
namespace integer {

template <int PLANE>
struct TransformedKeys {
  static constexpr int ROW = 4 * PLANE, MOST_WORDS = SUMS<2> / 4;  // words between two widenings
  static_assert(PLANE % PACK == 0);

  struct Work {
    alignas(64) int8_t q8[ROWS * PARTS * ROW];
    float step[ROWS], middle[ROWS], constant[ROWS];
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      for (int i = 0; i < R; ++i) {
        int8_t* hi = work.q8 + (row * PARTS + i) * ROW;
        prepare(task, row + i, work, hi, hi + R * ROW);
      }
    });
  }

  static void prepare(const Task& task, int row, Work& work, int8_t* hi, int8_t* lo) {
    const int slots = int(task.layout->slots), plane = slots / 4;
    const float* f = task.features + row * projected(*task.layout);
    alignas(64) float spread[ROW] = {};  // what lies between the planes stays 0
    for (int p = 0; p < 4; ++p) std::memcpy(spread + p * PLANE, f + p * plane, 4 * size_t(plane));
    Reals largest{};
    for (int i = 0; i < ROW; i += WIDTH) largest = max_abs(largest, L::load(spread + i));
    const float found = reduce<Max>(largest), top = found > 1e-30f ? found : 1e-30f;
    work.step[row] = top / RANGE;
    work.middle[row] = f[slots];
    work.constant[row] = f[slots + 1];
    const Reals factor = L::all(RANGE / top);
    for (int i = 0; i < ROW; i += PACK) {
      Reals x[PACK / WIDTH];
      unroll<PACK / WIDTH>([&](auto v) KVQ_LAMBDA { x[v] = fixed(L::load(spread + i + WIDTH * v), factor); });
      pack(x, hi + i, lo + i);
    }
  }

  static void score(Task& task, const Slab& slab, int column) {
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row); });
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row) {
    const Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    const int words = int(l.slots / 16), runs = (words + MOST_WORDS - 1) / MOST_WORDS;
    float* scores = task.scores + row * BLOCK + column;
    const auto finish = [&](auto r, int token, Reals s) KVQ_LAMBDA {
      const Reals step = L::all(work.step[row + r]), middle = L::all(work.middle[row + r]);
      const Reals scale = L::load_halves(slab.data + l.k_scale + 2 * token);
      store(scores + r * BLOCK + token, fmadd(scale, fmadd(s, step, middle), L::all(work.constant[row + r])));
    };
    dot_words<ROW, PLANE, 2, R>(slab.data + l.k_codes, words, (words + runs - 1) / runs,
                                work.q8 + row * PARTS * ROW, task.prefetch, finish);
  }
};

}  // namespace integer
}  // namespace

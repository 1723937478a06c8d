//     score_t = scale_t ( sum_k step_k sum_i s_i digit_it + middle ) + constant           k: the runs of words, i: a run's slots
//
// Transformed keys (digits.h). n slots in four planes; PLANE is the room for one, so that all offsets are constants.
#pragma once

#include "digits.h"

namespace {
namespace integer {

template <int PLANE>
struct TransformedKeys {
  static constexpr int ROW = 4 * PLANE, MOST_WORDS = SUMS<2> / 4;  // words between two widenings
  static_assert(PLANE % PACK == 0);

  struct Work {
    alignas(64) int8_t q8[ROWS * PARTS * ROW];
    float step[ROWS][DIGITS], middle[ROWS], constant[ROWS];
    Digits digits;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    work.digits.find(task);
    const auto place = [](int, int plane, int i) { return plane * PLANE + i; };
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      for (int i = 0; i < R; ++i) {
        int8_t* hi = work.q8 + (row * PARTS + i) * ROW;
        round_digits<ROW>(task, row + i, work.digits, place, work.step[row + i], work.middle + row + i, hi, hi + R * ROW);
      }
    });
  }

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    row_tiles(task.rows, [&](auto r, int row) {
      means<decltype(r)::value>(task, slab, row, work.constant + row);
      tile<decltype(r)::value>(task, slab, column, row);
    });
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row) {
    const Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    float* scores = task.scores + row * BLOCK + column;
    for (int k = 0; k < work.digits.count; ++k) {
      const int first = work.digits.runs[k].first, words = work.digits.runs[k].last - first;
      const int parts = (words + MOST_WORDS - 1) / MOST_WORDS;
      const auto finish = [&](auto r, int token, Reals s) KVQ_LAMBDA {
        float* score = scores + r * BLOCK + token;
        const Reals before = k ? L::load(score) : L::all(work.middle[row + r]);
        Reals sum = fmadd(s, L::all(work.step[row + r][k]), before);
        if (k + 1 == work.digits.count)
          sum = fmadd(L::load_scales(slab.data + l.k_scale + token), sum, L::all(work.constant[row + r]));
        store(score, sum);
      };
      dot_words<ROW, PLANE, 2, R>(slab.data + l.k_codes + 128 * first, words, (words + parts - 1) / parts,
                                  work.q8 + row * PARTS * ROW + 4 * first, task.prefetch, finish);
    }
  }
};

}  // namespace integer
}  // namespace

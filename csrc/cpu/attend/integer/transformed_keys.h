//     q . k_t = scale_t ( sum_i s_i digit_it - 1/2 sum_c f_c most_c ) + sum_i f_d+i e_i       s_i = 4^j f_c of slot i
//
// Transformed keys (formats/methods/klt.py): one scale per token, so a query's numbers for the slots are the same for all
// slabs and are rounded to fixed point once per task, from its features f (attend/float32/transformed.h). The mean of keys
// is a slab's own, by its e (pack/kinds/turning.h). A digit's numbers are four times as large as those of the digit below,
// so each digit has a unit of its own: slots come in words with the highest digits first, and a run of words has one unit.
// n slots in four planes; PLANE is the room for one, so that all offsets are constants.
#pragma once

#include "../../pack/kinds/turning.h"
#include "dot_keys.h"

namespace {
namespace integer {

template <int PLANE>
struct TransformedKeys {
  static constexpr int ROW = 4 * PLANE, MOST_WORDS = SUMS<2> / 4;  // words between two widenings
  static_assert(PLANE % PACK == 0);

  static constexpr int DIGITS = 3;

  struct Run {
    int first, last;  // words
  };

  struct Work {
    alignas(64) int8_t q8[ROWS * PARTS * ROW];
    float step[ROWS][DIGITS], middle[ROWS], constant[ROWS];
    Run runs[DIGITS];
    int count;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const int slots = int(task.layout->slots);
    const int32_t* shift = task.constants->places + slots;  // of a word's first slot, whose digit is its highest
    work.count = 0;
    for (int word = 0; word < slots / 16; ++word) {
      const bool lower = word && shift[4 * word] < shift[4 * word - 4];
      if (!word || (lower && work.count < DIGITS)) work.runs[work.count++].first = word;
      work.runs[work.count - 1].last = word + 1;
    }
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
    const int32_t *channel = task.constants->places, *shift = channel + slots;
    const float* features = task.features + row * projected(*task.layout);
    float f[4 * LARGEST_HEAD];
    for (int i = 0; i < slots; ++i) f[i] = features[channel[i]] * float(1 << shift[i]);
    alignas(64) float spread[ROW] = {};  // what lies between the planes stays 0
    for (int k = 0; k < work.count; ++k) {
      const int first = 4 * work.runs[k].first, last = 4 * work.runs[k].last;
      float top = 1e-30f;
      for (int p = 0; p < 4; ++p) {
        for (int i = first; i < last; ++i) {
          const float size = __builtin_fabsf(f[p * plane + i]);
          top = size > top ? size : top;
        }
      }
      const float factor = RANGE / top;
      work.step[row][k] = top / RANGE;
      for (int p = 0; p < 4; ++p)
        for (int i = first; i < last; ++i) spread[p * PLANE + i] = f[p * plane + i] * factor;
    }
    const float* most = task.constants->channels + 2 * task.layout->d;
    Reals middle{};
    for (int c = 0; c < task.layout->d; c += WIDTH) middle = fmadd(L::load(features + c), L::load(most + c), middle);
    work.middle[row] = -0.5f * reduce<Add>(middle);
    for (int i = 0; i < ROW; i += PACK) {
      Reals x[PACK / WIDTH];
      unroll<PACK / WIDTH>([&](auto v) KVQ_LAMBDA { x[v] = fixed(L::load(spread + i + WIDTH * v), L::all(1.0f)); });
      pack(x, hi + i, lo + i);
    }
  }

  static void score(Task& task, const Slab& slab, int column) {
    row_tiles(task.rows, [&](auto r, int row) {
      means<decltype(r)::value>(task, slab, row);
      tile<decltype(r)::value>(task, slab, column, row);
    });
  }

  // The products of R rows' numbers with the slab's e, which stays in registers.
  template <int R>
  KVQ_INLINE static void means(Task& task, const Slab& slab, int row) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    const int64_t half = l.d / 2, stride = projected(l);
    const float* f = task.features + row * stride + l.d;
    const float32::Turn turn = float32::turn_of(l, *task.constants, slab.page, slab.nth);
    Reals sums[R] = {};
    for (int64_t i = 0; i < half; i += WIDTH) {
      const Reals c = L::load(turn.fine + i), s = L::load(turn.fine + half + i);
      const Reals x = L::load(turn.coarse + i), y = L::load(turn.coarse + half + i);
      const Reals cosine = c * x - s * y, sine = s * x + c * y;
      unroll<R>([&](auto r) KVQ_LAMBDA {
        sums[r] = fmadd(L::load(f + r * stride + i), cosine, sums[r]);
        sums[r] = fmadd(L::load(f + r * stride + half + i), sine, sums[r]);
      });
    }
    unroll<R>([&](auto r) KVQ_LAMBDA { work.constant[row + r] = reduce<Add>(sums[r]); });
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row) {
    const Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    float* scores = task.scores + row * BLOCK + column;
    for (int k = 0; k < work.count; ++k) {
      const int first = work.runs[k].first, words = work.runs[k].last - first;
      const int parts = (words + MOST_WORDS - 1) / MOST_WORDS;
      const auto finish = [&](auto r, int token, Reals s) KVQ_LAMBDA {
        float* score = scores + r * BLOCK + token;
        const Reals before = k ? L::load(score) : L::all(work.middle[row + r]);
        Reals sum = fmadd(s, L::all(work.step[row + r][k]), before);
        if (k + 1 == work.count)
          sum = fmadd(L::load_halves(slab.data + l.k_scale + 2 * token), sum, L::all(work.constant[row + r]));
        store(score, sum);
      };
      dot_words<ROW, PLANE, 2, R>(slab.data + l.k_codes + 128 * first, words, (words + parts - 1) / parts,
                                  work.q8 + row * PARTS * ROW + 4 * first, task.prefetch, finish);
    }
  }
};

}  // namespace integer
}  // namespace

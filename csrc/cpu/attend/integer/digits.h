//     q . k_t = scale_t ( sum_i s_i digit_it - 1/2 sum_c f_c most_c ) + sum_i f_d+i e_i       s_i = 4^j f_c of slot i
//
// What a query of transformed keys (formats/methods/klt.py) becomes before it meets the digits. With one scale per token, its
// numbers for the slots are the same for all slabs and are rounded to fixed point once per task, from its features f
// (attend/float32/transformed.h). The mean of keys is a slab's own, by its e (pack/kinds/turning.h). A digit's numbers are
// four times as large as those of the digit below, so each digit has a unit of its own: slots come in words with the
// highest digits first, and a run of words has one unit.
#pragma once

#include "../../pack/kinds/turning.h"
#include "dot_keys.h"

namespace {
namespace integer {

constexpr int DIGITS = 3;

struct Digits {
  struct Run {
    int first, last;  // words
  };
  Run runs[DIGITS];
  int count;

  void find(const Task& task) {
    const int slots = int(task.layout->slots);
    const int32_t* shift = task.constants->places + slots;  // of a word's first slot, whose digit is its highest
    count = 0;
    for (int word = 0; word < slots / 16; ++word) {
      const bool lower = word && shift[4 * word] < shift[4 * word - 4];
      if (!word || (lower && count < DIGITS)) runs[count++].first = word;
      runs[count - 1].last = word + 1;
    }
  }
};

// A row's numbers, in the units `step` of the runs: slot i of a plane of run k is byte place(k, plane, i) of the ROW bytes
// of hi and of lo.
template <int ROW, class Place>
inline void round_digits(const Task& task, int row, const Digits& digits, Place place, float* step, float* middle,
                         int8_t* hi, int8_t* lo) {
  const int slots = int(task.layout->slots), plane = slots / 4;
  const int32_t *channel = task.constants->places, *shift = channel + slots;
  const float* features = task.features + row * projected(*task.layout);
  float f[4 * LARGEST_HEAD];
  for (int i = 0; i < slots; ++i) f[i] = features[channel[i]] * float(1 << shift[i]);
  alignas(64) float spread[ROW] = {};  // what has no slot stays 0
  for (int k = 0; k < digits.count; ++k) {
    const int first = 4 * digits.runs[k].first, last = 4 * digits.runs[k].last;
    float top = 1e-30f;
    for (int p = 0; p < 4; ++p) {
      for (int i = first; i < last; ++i) {
        const float size = __builtin_fabsf(f[p * plane + i]);
        top = size > top ? size : top;
      }
    }
    const float factor = RANGE / top;
    step[k] = top / RANGE;
    for (int p = 0; p < 4; ++p)
      for (int i = first; i < last; ++i) spread[place(k, p, i)] = f[p * plane + i] * factor;
  }
  const float* most = task.constants->channels + 2 * task.layout->d;
  Reals sum{};
  for (int c = 0; c < task.layout->d; c += WIDTH) sum = fmadd(L::load(features + c), L::load(most + c), sum);
  *middle = -0.5f * reduce<Add>(sum);
  for (int i = 0; i < ROW; i += PACK) {
    Reals x[PACK / WIDTH];
    unroll<PACK / WIDTH>([&](auto v) KVQ_LAMBDA { x[v] = fixed(L::load(spread + i + WIDTH * v), L::all(1.0f)); });
    pack(x, hi + i, lo + i);
  }
}

// The products of R rows' numbers with the slab's e, which stays in registers.
template <int R>
KVQ_INLINE void means(const Task& task, const Slab& slab, int row, float* constant) {
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
  unroll<R>([&](auto r) KVQ_LAMBDA { constant[r] = reduce<Add>(sums[r]); });
}

}  // namespace integer
}  // namespace

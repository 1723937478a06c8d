//     score_t = scale_t ( sum_k step_k sum_i s_i digit_it + middle ) + constant           k: the runs of words, i: a run's slots
//
// Transformed keys by products of tiles. Their query (integer/digits.h) is prepared once per task. Every run begins a
// tile of its own, because its sums have their own unit.
#pragma once

#include "folded_keys.h"
#include "../integer/digits.h"

namespace {
namespace amx {

template <int PLANE>
struct DigitKeys {
  using Digits = integer::Digits;
  static constexpr int RUNS = integer::DIGITS, PLANES = 4;
  // a run fills its last tile only in part, but all runs together do not have more than PLANE / 4 words
  static constexpr int TILES = PLANE / TILE_ROWS + RUNS - 1, ROW = TILES * TILE_BYTES;

  struct Work {
    Digits* digits;
    int8_t* bytes;
    float (*step)[RUNS];
    float *middle, *constant[BLOCK_SLABS];
    Codes codes[2];
    FewSums sums[2][RUNS];

    Work(const Layout&, int rows, Arrays& arrays) {
      digits = arrays.take<Digits>(1);
      bytes = arrays.take_rows(rows, ROW);
      step = arrays.take<float[RUNS]>(rows);
      middle = arrays.take<float>(rows);
      for (int s = 0; s < BLOCK_SLABS; ++s) constant[s] = arrays.take<float>(rows);
      for (int turn = 0; turn < 2; ++turn) {
        codes[turn] = arrays.take_codes(TILES);
        for (int k = 0; k < RUNS; ++k) sums[turn][k] = arrays.take_sums(rows);
      }
    }
  };

  static int words_of(const Digits& digits, int k) { return digits.runs[k].last - digits.runs[k].first; }
  static int tiles_of(const Digits& digits, int k) { return (PLANES * words_of(digits, k) + TILE_ROWS - 1) / TILE_ROWS; }

  static size_t work_bytes(const Layout& l) { return bytes_of<Work>(l); }

  static void begin(Task& task) {
    const Work work = work_of<Work>(task, task.key_work);
    Digits& digits = *work.digits;
    digits.find(task);
    int first[RUNS], tile = 0;  // a run's first byte
    for (int k = 0; k < digits.count; ++k) {
      first[k] = tile * TILE_BYTES;
      tile += tiles_of(digits, k);
    }
    const auto place = [&](int k, int plane, int i) {
      return first[k] + 4 * (PLANES * (i / 4 - digits.runs[k].first) + plane) + i % 4;
    };
    for (int row = 0; row < task.rows; ++row) {
      int8_t* hi = work.bytes + (row / 4 * 8 + row % 4) * ROW;
      integer::round_digits<ROW>(task, row, digits, place, work.step[row], work.middle + row, hi, hi + 4 * ROW);
    }
  }

  static void score(Task& task, const Slab* slabs, int count) {
    const Work work = work_of<Work>(task, task.key_work);
    by_turns(
        count, [&](int s) { prepare(task, slabs[s], work, s); }, [&](int s) { products(task, work, s % 2); },
        [&](int s) { finish(task, slabs[s], work, s); });
  }

  static void prepare(Task& task, const Slab& slab, const Work& work, int s) {
    const Digits& digits = *work.digits;
    row_tiles(task.rows, [&](auto r, int row) {
      integer::means<decltype(r)::value>(task, slab, row, work.constant[s] + row);
    });
    Codes codes = work.codes[s % 2];
    for (int k = 0; k < digits.count; ++k) {
      const uint8_t* words = slab.data + task.layout->k_codes + 128 * digits.runs[k].first;
      unpack_keys<2, PLANES, 1>(words, words_of(digits, k), codes, task.prefetch);
      codes.at += tiles_of(digits, k) * TILE;
    }
  }

  static void products(const Task& task, const Work& work, int turn) {
    const Digits& digits = *work.digits;
    Codes codes = work.codes[turn];
    const int8_t* bytes = work.bytes;
    for (int k = 0; k < digits.count; ++k) {
      const int tiles = tiles_of(digits, k);
      multiply(task.rows, bytes, ROW, codes, tiles, work.sums[turn][k]);
      bytes += tiles * TILE_BYTES;
      codes.at += tiles * TILE;
    }
  }

  static void finish(Task& task, const Slab& slab, const Work& work, int s) {
    for (int row = 0; row < task.rows; ++row) {
      float* to = task.scores + row * BLOCK + s * SLAB;
      for (int half = 0; half < 2; ++half) {
        __m512 sum = L::all(work.middle[row]);
        for (int k = 0; k < work.digits->count; ++k)
          sum = integer::fmadd(work.sums[s % 2][k].of(row, half), L::all(work.step[row][k]), sum);
        const __m512 constant = L::all(work.constant[s][row]);
        const __m512 scale = L::load_scales(slab.data + task.layout->k_scale + half * TILE_ROWS);
        integer::store(to + half * TILE_ROWS, integer::fmadd(scale, sum, constant));
      }
    }
  }
};

}  // namespace amx
}  // namespace

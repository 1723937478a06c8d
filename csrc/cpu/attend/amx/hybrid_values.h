//     sum_t p_t v_tc = step sum_s ( |scale_sc| sum_t w_t u_tc + zero_sc sum_t w_t )          w: p in fixed point, s: slabs
//
// InnerQ's values (vnni/hybrid_values.h) by products of tiles, 32 channels of two slabs at a time. Every slab has scales of
// its own, so their sums stay apart (halves.h). What is in the tile of a second slab that is missing is not used.
#pragma once

#include "halves.h"
#include "../vnni/hybrid_values.h"

namespace {
namespace amx {

struct HybridValues {
  using Rows = integer::HybridValues2;
  using FourWeights = int8_t[PARTS][4][BLOCK];
  using FourSums = float[BLOCK_SLABS][4];

  struct Work {
    FourWeights* weights;
    FourSums* sum;
    float *step, *total;  // total[rows][COLUMNS], in units of `step`
    int8_t* bytes;
    Codes codes[2];
    FewSums sums[2];

    Work(const Layout&, int rows, Arrays& arrays) {
      weights = arrays.take<FourWeights>(1);
      sum = arrays.take<FourSums>((rows + 3) / 4);
      step = arrays.take<float>(rows + 3);
      total = arrays.take<float>(rows * COLUMNS);
      bytes = arrays.take_rows(rows_of_halves(rows), BLOCK);
      for (int turn = 0; turn < 2; ++turn) {
        codes[turn] = arrays.take_codes(1);
        sums[turn] = arrays.take_sums(rows_of_halves(rows));
      }
    }
  };

  static size_t work_bytes(const Layout& l) { return bytes_of<Work>(l); }

  static void add(Task& task, const Slab* slabs, int count) {
    const Work work = work_of<Work>(task, task.value_work);
    const Layout& l = *task.layout;
    row_tiles(task.rows, [&](auto r, int row) {
      Rows::weigh<decltype(r)::value>(task.scores + row * BLOCK, count, *work.weights, work.step + row, work.sum[row / 4]);
      split_halves<BLOCK>((*work.weights)[0][0], work.bytes + row / 4 * TILE_ROWS * BLOCK);
    });
    const int rows = rows_of_halves(task.rows), pairs = (count + 1) / 2;
    by_turns(
        int(l.d) / COLUMNS * pairs,
        [&](int i) { unpack(l, slabs, count, i % pairs, i / pairs * COLUMNS, work.codes[i % 2], task.prefetch); },
        [&](int i) { multiply(rows, work.bytes + i % pairs * TILE_BYTES, BLOCK, work.codes[i % 2], 1, work.sums[i % 2]); },
        [&](int i) {
          const int s = i % pairs * 2, c = i / pairs * COLUMNS;
          for (int odd = 0; odd < 2 && s + odd < count; ++odd)
            finish(task, slabs[s + odd], s + odd, c, work, work.sums[i % 2]);
          if (s + 2 >= count) store(task, c, work);
        });
  }

  static integer::HybridParameters parameters(const Layout& l, const Slab& slab, int c) {
    integer::HybridParameters p;
    p.read(slab.data + l.v_scale + 2 * c, slab.data + l.v_slot + 4 * c);
    return p;
  }

  static void unpack(const Layout& l, const Slab* slabs, int count, int pair, int c, const Codes& to,
                     Prefetch& prefetch) {
    const int stride = int(l.d) / 4;  // channels of a plane
    for (int odd = 0; odd < 2 && 2 * pair + odd < count; ++odd) {
      const Slab& slab = slabs[2 * pair + odd];
      const char* ahead = prefetch.take<8>();
      for (int half = 0; half < 2; ++half) {
        const int first = c + half * TILE_ROWS;
        const __m512i signs = parameters(l, slab, first).signs, by = L::all32(first / stride * 2);
        const uint8_t* words = slab.data + l.v_codes + first % stride * 4;
        unroll<8>([&](auto e) KVQ_LAMBDA {
          const __m512i w = L::load_bytes(words + e * stride * 4);
          integer::store_bytes(to.line(half, 8 * odd + e), integer::hybrid_codes<e>(integer::shift_right(w, by), signs));
          if (half == 0) __builtin_prefetch(ahead + 64 * e, 0, 3);
        });
      }
    }
  }

  static void finish(const Task& task, const Slab& slab, int s, int c, const Work& work, const FewSums& sums) {
    for (int half = 0; half < 2; ++half) {
      const integer::HybridParameters p = parameters(*task.layout, slab, c + half * TILE_ROWS);
      for (int row = 0; row < task.rows; ++row) {
        float* to = work.total + row * COLUMNS + half * TILE_ROWS;
        const __m512 sum = L::all(work.sum[row / 4][s][row % 4]);
        const __m512 zeros = integer::fmadd(p.zero, sum, s ? L::load(to) : _mm512_setzero_ps());
        integer::store(to, integer::fmadd(sums.of(row_of_half(row, s % 2), half), p.scale, zeros));
      }
    }
  }

  static void store(const Task& task, int c, const Work& work) {
    for (int row = 0; row < task.rows; ++row)
      for (int half = 0; half < 2; ++half) {
        float* to = task.out + row * task.layout->d + c + half * TILE_ROWS;
        const __m512 total = L::load(work.total + row * COLUMNS + half * TILE_ROWS);
        integer::store(to, integer::fmadd(total, L::all(work.step[row]), L::load(to)));
      }
  }
};

}  // namespace amx
}  // namespace

//     q . k_t = sum_g ( |scale_gt| step_g sum_c q'_c u_ct + zero_gt sum_c q'_c )          q': in fixed point, u: codes and signs
//
// InnerQ's keys (integer/hybrid_keys.h) by products of tiles. Groups of 32 channels have scales of their own, so their sums
// stay apart (halves.h). A page with another norm changes all rows, so slabs are taken together as far as it is the same.
#pragma once

#include "halves.h"
#include "../integer/hybrid_keys.h"

namespace {
namespace amx {

template <int D>
struct HybridKeys {
  using Rows = integer::HybridKeys2<D>;
  static constexpr int PAIRS = D / TILE_BYTES, STRIDE = D / 4;  // pairs of groups, channels of a plane

  struct Work {
    typename Rows::Work* rows;
    int8_t* bytes;
    Codes codes[2];
    FewSums sums[2];

    Work(const Layout&, int count, Arrays& arrays) {
      rows = arrays.take<typename Rows::Work>(1);
      bytes = arrays.take_rows(rows_of_halves(count), D);
      for (int turn = 0; turn < 2; ++turn) {
        codes[turn] = arrays.take_codes(1);
        sums[turn] = arrays.take_sums(rows_of_halves(count));
      }
    }
  };

  static size_t work_bytes(const Layout& l) { return bytes_of<Work>(l); }
  static void begin(Task&) {}

  static void score(Task& task, const Slab* slabs, int count) {
    const Work work = work_of<Work>(task, task.key_work);
    const auto norm = [&](int s) { return slabs[s].page + task.layout->k_inner_norm; };
    const auto prepared = [&](int s) { return !std::memcmp(work.rows->norm, norm(s), sizeof work.rows->norm); };
    for (int first = 0, last; first < count; first = last) {
      if (!task.prepared || !prepared(first)) {
        Rows::prepare(task, norm(first), *work.rows);
        for (int four = 0; 4 * four < task.rows; ++four)
          split_halves<D>(work.rows->q8[four][0][0], work.bytes + four * TILE_ROWS * D);
      }
      task.prepared = slabs[first].page;
      last = first + 1;
      while (last < count && (slabs[last].page == slabs[first].page || prepared(last))) ++last;
      score_alike(task, slabs, first, last, work);
    }
  }

  static void score_alike(Task& task, const Slab* slabs, int first, int last, const Work& work) {
    const int rows = rows_of_halves(task.rows);
    by_turns(
        (last - first) * PAIRS,
        [&](int i) { unpack(*task.layout, slabs[first + i / PAIRS], i % PAIRS, work.codes[i % 2], task.prefetch); },
        [&](int i) { multiply(rows, work.bytes + i % PAIRS * TILE_BYTES, D, work.codes[i % 2], 1, work.sums[i % 2]); },
        [&](int i) {
          const int s = first + i / PAIRS;
          finish(task, slabs[s], i % PAIRS, work, task.scores + s * SLAB, work.sums[i % 2]);
        });
  }

  static integer::HybridParameters parameters(const Layout& l, const Slab& slab, int g, int half) {
    const int at = g * SLAB + half * TILE_ROWS;
    integer::HybridParameters p;
    p.read(slab.data + l.k_scale + 2 * at, slab.data + l.k_slot + 4 * at);
    return p;
  }

  // The codes of two groups.
  static void unpack(const Layout& l, const Slab& slab, int pair, const Codes& to, Prefetch& prefetch) {
    for (int odd = 0; odd < 2; ++odd) {
      const int g = 2 * pair + odd, c = 32 * g;
      const __m512i by[2] = {L::all32(c / STRIDE * 2), L::all32((c + 16) / STRIDE * 2)};
      const char* ahead = prefetch.take<8>();
      for (int half = 0; half < 2; ++half) {
        const __m512i signs = parameters(l, slab, g, half).signs;
        const uint8_t* words = slab.data + l.k_codes + half * TILE_BYTES;
        unroll<8>([&](auto e) KVQ_LAMBDA {
          const __m512i w = L::load_bytes(words + (c + 4 * e) % STRIDE * 32);
          const __m512i codes = integer::hybrid_codes<e>(integer::shift_right(w, by[e / 4]), signs);
          integer::store_bytes(to.line(half, 8 * odd + e), codes);
          if (half == 0) __builtin_prefetch(ahead + 64 * e, 0, 3);
        });
      }
    }
  }

  static void finish(const Task& task, const Slab& slab, int pair, const Work& work, float* scores, const FewSums& sums) {
    for (int half = 0; half < 2; ++half)
      for (int odd = 0; odd < 2; ++odd) {
        const int g = 2 * pair + odd;
        const integer::HybridParameters p = parameters(*task.layout, slab, g, half);
        for (int row = 0; row < task.rows; ++row) {
          float* to = scores + row * BLOCK + half * TILE_ROWS;
          const __m512 step = L::all(work.rows->step[row][g]), sum = L::all(work.rows->sum[row][g]);
          const __m512 zeros = integer::fmadd(p.zero, sum, g ? L::load(to) : _mm512_setzero_ps());
          integer::store(to, integer::fmadd(sums.of(row_of_half(row, odd), half), p.scale * step, zeros));
        }
      }
  }
};

}  // namespace amx
}  // namespace

//     sum_t p_t v_tc = step sum_t w_tg code_tc + offset_g          w_tg: p_t scale_tg in fixed point, g: the group of c
//
// Values per token by products of tiles: the weights of vnni/token_weights.h, 32 channels at a time. A right tile has the
// 64 tokens of two slabs.
#pragma once

#include "few.h"
#include "../vnni/token_weights.h"

namespace {
namespace amx {

template <int BITS, bool SEARCHED = false>
struct TokenValues {
  using Weights = integer::TokenWeights<BITS, SEARCHED>;
  static constexpr int LOW = BITS == 3 ? 2 : BITS;      // bits in v_codes; a third one is in v_high
  static constexpr int QUADS = SLAB / 4, PAIRS = BLOCK_SLABS / 2;  // lines of a slab, right tiles of a block

  struct Work {
    float *widest, *step, *offset;  // offset[group][rows, in fours]
    __mmask16* attended;
    int8_t* weights[2];  // of a group, by turns: [rows / 4][PARTS][4][BLOCK]
    Codes codes[2];
    FewSums sums[2];

    Work(const Layout& l, int rows, Arrays& arrays) {
      widest = arrays.take<float>(BLOCK);
      step = arrays.take<float>(in_fours(rows));
      offset = arrays.take<float>(Weights::groups_of(l) * in_fours(rows));
      attended = arrays.take<__mmask16>(BLOCK / 16);
      for (int turn = 0; turn < 2; ++turn) {
        weights[turn] = arrays.take_rows(rows, BLOCK);
        codes[turn] = arrays.take_codes(PAIRS);
        sums[turn] = arrays.take_sums(rows);
      }
    }
  };

  static int in_fours(int rows) { return (rows + 3) / 4 * 4; }

  static size_t work_bytes(const Layout& l) { return bytes_of<Work>(l); }

  static void add(Task& task, const Slab* slabs, int count) {
    const Work work = work_of<Work>(task, task.value_work);
    const Layout& l = *task.layout;
    Weights::find_attended(slabs, count, work.attended);
    Weights::find_widest(l, slabs, count, Weights::groups_of(l), work.attended, work.widest);
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      float* p = task.scores + row * BLOCK;
      if (count % 2)  // their weights of 0 must not meet NaN
        for (int i = 0; i < R; ++i) std::memset(p + i * BLOCK + count * SLAB, 0, SLAB * sizeof(float));
      Weights::template scale_weights<R>(l, p, count, work.widest, p, work.step + row);
    });
    const int columns = int(l.d / COLUMNS), of_group = int(l.group / COLUMNS), pairs = (count + 1) / 2;
    by_turns(
        columns,
        [&](int i) {
          if (i % of_group == 0) weigh(task, slabs, count, i / of_group, work);
          unpack(l, slabs, count, i * COLUMNS, work.codes[i % 2], task.prefetch);
        },
        [&](int i) {
          multiply(task.rows, work.weights[i / of_group % 2], BLOCK, work.codes[i % 2], pairs, work.sums[i % 2]);
        },
        [&](int i) { finish(task, work, i * COLUMNS, i / of_group, work.sums[i % 2]); });
  }

  static void weigh(const Task& task, const Slab* slabs, int count, int g, const Work& work) {
    const Layout& l = *task.layout;
    row_tiles(task.rows, [&](auto r, int row) {
      auto& weights = *reinterpret_cast<integer::GroupWeights*>(work.weights[g % 2] + PARTS * row * BLOCK);
      Weights::template weigh<decltype(r)::value>(l, slabs, count, g, work.attended, task.scores + row * BLOCK,
                                                  work.step + row, weights, work.offset + g * in_fours(task.rows) + row);
    });
  }

  // Channels c to c + 31. What is in the tile of a second slab that is missing meets weights of 0.
  static void unpack(const Layout& l, const Slab* slabs, int count, int c, const Codes& to, Prefetch& prefetch) {
    const int stride = int(l.d) * LOW / 8, high_stride = stride / 2;  // channels of a plane
    const __m512i mask = L::all8((1 << LOW) - 1);
    for (int s = 0; s < count; ++s) {
      const char* ahead = prefetch.take<QUADS>();
      for (int quad = 0; quad < QUADS; ++quad) __builtin_prefetch(ahead + 64 * quad, 0, 3);
      for (int half = 0; half < 2; ++half) {
        const int first = c + half * TILE_ROWS;
        const uint8_t* words = slabs[s].data + l.v_codes + first % stride * 4;
        const __m512i by = L::all32(first / stride * LOW);
        const uint8_t* thirds = slabs[s].data + l.v_high + first % high_stride * 4;
        const __m512i third = L::planes(first, high_stride, 1);
        unroll<QUADS>([&](auto quad) KVQ_LAMBDA {
          __m512i codes = integer::shift_right(L::load_bytes(words + quad * stride * 4), by) & mask;
          if constexpr (BITS == 3) {
            const uint8_t* plane = thirds + quad * high_stride * 4;
            const bool whole = high_stride % L::LANES == 0;
            codes = integer::with_third_bit(codes, whole ? L::load_bytes(plane) : L::load_plane(plane, first, high_stride), third);
          }
          integer::store_bytes(to.line(half, s * QUADS + quad), codes);
        });
      }
    }
  }

  static void finish(Task& task, const Work& work, int c, int g, const FewSums& sums) {
    const int64_t d = task.layout->d;
    const float* offsets = work.offset + g * in_fours(task.rows);
    for (int row = 0; row < task.rows; ++row) {
      const __m512 step = L::all(work.step[row]), offset = L::all(offsets[row]);
      for (int half = 0; half < 2; ++half) {
        float* to = task.out + row * d + c + half * TILE_ROWS;
        const __m512 before = _mm512_add_ps(L::load(to), offset);
        integer::store(to, integer::fmadd(sums.of(row, half), step, before));
      }
    }
  }
};

}  // namespace amx
}  // namespace

//     q . k_t = step_s sum_c q'_sc code_ct + offset_s          q'_s: the query in fixed point, folded with slab s
//
// Keys whose scales lie along channels, SQuat's, KIVI's and Kitty's (integer/channel_keys.h, boosted_keys.h): their folding,
// and the products by tiles.
#pragma once

#include "few.h"
#include "../integer/boosted_keys.h"
#include "../integer/channel_keys.h"

namespace {
namespace amx {

// `count` words of key codes, two halves of 16 tokens each: plane p of word i becomes line WORD * i + PLANE * p.
template <int BITS, int WORD, int PLANE>
KVQ_INLINE void unpack_keys(const uint8_t* words, int count, const Codes& to, Prefetch& prefetch) {
  using namespace integer;
  const __m512i mask = L::all8((1 << BITS) - 1);
  const char* ahead = prefetch.take(LINES * count);
  for (int word = 0; word < count; ++word) {
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + 64 * (LINES * word + i), 0, 3);
    unroll<2>([&](auto half) KVQ_LAMBDA {
      const __m512i w = L::load_bytes(words + word * 128 + half * 64);
      unroll<8 / BITS>([&](auto plane) KVQ_LAMBDA {
        store_bytes(to.line(half, WORD * word + PLANE * plane), shift_right<BITS * plane>(w) & mask);
      });
    });
  }
}

// K: kernels of VNNI. What has no codes between two planes meets zeros of the query.
template <class K>
struct FoldedKeys {
  static constexpr int TILES = K::ROW / TILE_BYTES;

  struct Work {
    typename K::Folded* folded;
    int8_t* bytes[2];
    Codes codes[2];
    FewSums sums[2];
    float *step[BLOCK_SLABS], *offset[BLOCK_SLABS];

    Work(const Layout&, int rows, Arrays& arrays) {
      folded = arrays.take<typename K::Folded>(1);
      for (int turn = 0; turn < 2; ++turn) {
        bytes[turn] = arrays.take_rows(rows, K::ROW);
        codes[turn] = arrays.take_codes(TILES);
        sums[turn] = arrays.take_sums(rows);
      }
      for (int s = 0; s < BLOCK_SLABS; ++s) {
        step[s] = arrays.take<float>(rows + 3);
        offset[s] = arrays.take<float>(rows + 3);
      }
    }
  };

  static size_t work_bytes(const Layout& l) { return bytes_of<Work>(l); }
  static void begin(Task& task) { work_of<Work>(task, task.key_work).folded->begin(); }

  static void score(Task& task, const Slab* slabs, int count) {
    const Work work = work_of<Work>(task, task.key_work);
    by_turns(
        count, [&](int s) { prepare(task, slabs[s], work, s); },
        [&](int s) { multiply(task.rows, work.bytes[s % 2], K::ROW, work.codes[s % 2], TILES, work.sums[s % 2]); },
        [&](int s) { finish(task, work, s); });
  }

  static void prepare(Task& task, const Slab& slab, const Work& work, int s) {
    const Layout& l = *task.layout;
    work.folded->find(l, slab);
    row_tiles(task.rows, [&](auto r, int row) {
      int8_t* hi = work.bytes[s % 2] + PARTS * row * K::ROW;
      K::template fold<decltype(r)::value>(task.query + row * l.d, l, slab, *work.folded, hi, hi + 4 * K::ROW,
                                           work.step[s] + row, work.offset[s] + row);
    });
    unpack_keys<K::CODE_BITS, 1, K::PLANE / 4>(slab.data + l.k_codes, K::words(l), work.codes[s % 2], task.prefetch);
  }

  static void finish(Task& task, const Work& work, int s) {
    for (int row = 0; row < task.rows; ++row) {
      const __m512 step = L::all(work.step[s][row]), offset = L::all(work.offset[s][row]);
      float* to = task.scores + row * BLOCK + s * SLAB;
      for (int half = 0; half < 2; ++half)
        integer::store(to + half * TILE_ROWS, integer::fmadd(work.sums[s % 2].of(row, half), step, offset));
    }
  }
};

}  // namespace amx
}  // namespace

//     q . k_t = sum_g ( |scale_gt| sum_c q'_c u_ct + zero_gt sum_c q'_c ),    q' = q * norm
//     symmetric:  u = code + 4 sign,  zero = -4 |scale|        asymmetric:  u = code
//
// InnerQ's keys with 2 bits (formats/methods/innerq.py): per token and group g of 32 channels a scale, and either a zero or 32
// sign bits. So the sign is one more bit of an unsigned code. q' is rounded to fixed point once per norm, which changes
// at most from page to page. Scales multiply the partial scores of a vector of tokens.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

// The parameters of WIDTH groups: what a slot holds depends on the sign of the scale.
struct HybridParameters {
  Reals scale, zero;
  Ints signs;

  KVQ_INLINE void read(const uint8_t* scales, const uint8_t* slots) {
    const Reals stored = L::load_halves(scales);
    const Ints slot = L::load_bytes(slots);
    scale = absolute(stored);
    zero = times_if_negative(stored, L::all(4.0f), slot);
    signs = where_negative(stored, slot);
  }
};

// The codes of one quad: two bits from the bytes, the third from the sign words. (word >> quad) & 0x01010101 are the
// quad's signs, so shifted to bit 2 that is a shift by quad - 2.
template <int QUAD>
KVQ_INLINE Ints hybrid_codes(Ints shifted_bytes, Ints signs) {
  const Ints aligned = QUAD < 2 ? shift_left<(QUAD < 2 ? 2 - QUAD : 0)>(signs) : shift_right<(QUAD < 2 ? 0 : QUAD - 2)>(signs);
  return or_masked(shifted_bytes & L::all8(3), aligned, L::all8(4));
}

template <int D>
struct HybridKeys2 {
  static constexpr int GROUPS = D / 32, STRIDE = D / 4, PIECES = STRIDE % 16 ? 4 : 2;
  static_assert(8 <= SUMS<3>);  // quads of a group

  struct Work {
    uint16_t norm[D];
    float step[ROWS][GROUPS], sum[ROWS][GROUPS];  // of a row's group: scale of its fixed point, sum of q'
    alignas(64) int8_t q8[ROWS / 4][PARTS][4][D];
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static void begin(Task&) {}

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    if (task.prepared != slab.page) prepare(task, slab.page + task.layout->k_inner_norm, work);
    task.prepared = slab.page;
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  static void prepare(const Task& task, const uint8_t* norm, Work& work) {
    if (task.prepared && !std::memcmp(work.norm, norm, sizeof work.norm)) return;
    std::memcpy(work.norm, norm, sizeof work.norm);
    for (int row = 0; row < task.rows; ++row)
      for (int first = 0; first < D; first += PACK) {
        const int c = whole_pack<D>(first);
        Reals x[PACK / WIDTH];
        unroll<PACK / 32>([&](auto i) KVQ_LAMBDA {
          constexpr int vector = i * PER_SLAB;
          const int g = c / 32 + i;
          Reals largest = Reals{}, total = Reals{};
          unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA {
            const int at = c + WIDTH * (vector + v);
            x[vector + v] = L::load(task.query + row * D + at) * L::load_halves(norm + 2 * at);
            largest = max_abs(largest, x[vector + v]);
          });
          const float top = reduce<Max>(largest) + 1e-30f;
          work.step[row][g] = top / RANGE;
          unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA {
            x[vector + v] = fixed(x[vector + v], L::all(RANGE / top));
            // the sum of the rounded q', so that its errors multiply k and not the larger u
            total = total + integer_of(x[vector + v]);
          });
          work.sum[row][g] = work.step[row][g] * reduce<Add>(total);
        });
        pack(x, work.q8[row / 4][0][row % 4] + c, work.q8[row / 4][1][row % 4] + c);
      }
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    constexpr int X = R * PARTS, T = VECTORS<X>;
    const Layout& l = *task.layout;
    const uint8_t* codes = slab.data + l.k_codes;
    const int8_t* q8 = work.q8[row / 4][0][0];
    for (int token = 0; token < SLAB; token += WIDTH * T) {
      Reals scores[R][T];
      clear(scores);
      for (int g = 0; g < GROUPS; ++g) {
        HybridParameters p[T];
        unroll<T>([&](auto t) KVQ_LAMBDA {
          const int at = g * SLAB + token + WIDTH * t;
          p[t].read(slab.data + l.k_scale + 2 * at, slab.data + l.k_slot + 4 * at);
        });
        Ints acc[CHAINS<R>][X][T];
        clear(acc);
        // a group's channels lie in one plane, or its halves in two, or its quarters
        Ints by[PIECES];
        unroll<PIECES>([&](auto i) KVQ_LAMBDA { by[i] = L::all32((32 * g + 32 / PIECES * i) / STRIDE * 2); });
        const char* ahead = task.prefetch.template take<LINES_OF_8>();
        unroll<8>([&](auto e) KVQ_LAMBDA {
          const int c = 32 * g + 4 * e;
          const uint8_t* word = codes + c % STRIDE * 32 + token * 4;
          Ints code[T];
          unroll<T>([&](auto t) KVQ_LAMBDA {
            code[t] = hybrid_codes<e>(shift_right(L::load_bytes(word + 4 * WIDTH * t), by[e * PIECES / 8]), p[t].signs);
          });
          if (e % (8 / LINES_OF_8) == 0) __builtin_prefetch(ahead + e * LINES_OF_8 / 8 * 64, 0, 3);
          unroll<X>([&](auto x) KVQ_LAMBDA {
            constexpr int part = x / R, r = x % R;
            const Ints b = quad(q8 + (part * 4 + r) * D + c);
            unroll<T>([&](auto t) KVQ_LAMBDA { dot(acc[e % CHAINS<R>][x][t], code[t], b); });
          });
        });
        add_chains(acc);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const Reals step = L::all(work.step[row + r][g]), sum = L::all(work.sum[row + r][g]);
          unroll<T>([&](auto t) KVQ_LAMBDA {
            const Reals zeros = fmadd(p[t].zero, sum, scores[r][t]);
            const Reals x = to_reals(join(acc[0][r][t], acc[0][R + r][t]));
            scores[r][t] = fmadd(x, p[t].scale * step, zeros);
          });
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        unroll<T>([&](auto t) KVQ_LAMBDA {
          store(task.scores + (row + r) * BLOCK + column + token + WIDTH * t, scores[r][t]);
        });
      });
    }
  }
};

}  // namespace integer
}  // namespace

//     sum_t p_t v_tc = sum_t (p_t scale_tg) code_tc + sum_t p_t zero_tg          g: the group of channel c
//
// Values per token (formats/methods/values.py): one scale and one zero per token and group of channels. The scales are
// multiplied into the softmax weights once per block, which are then rounded to fixed point per row and group. 32
// channels are taken at a time, as two vectors that share their weights because groups are multiples of 32.
//
// This kernel has a twin in ../avx2. As one source, g++ 12 spilled the sums of the VNNI kernel: squat2 rose from 0.406
// to 0.416 instructions per cached element with 4 query heads, and from 0.197 to 0.214 with one.
#pragma once

#include "token_weights.h"

namespace {
namespace integer {

using namespace kvq;

// What does not depend on whether a token's zero is stored.
template <int BITS>
struct TokenProducts {
  static constexpr int LOW = BITS == 3 ? 2 : BITS;  // bits in v_codes; a third one is in v_high

  struct Work {
    alignas(64) float widest[BLOCK];                         // the largest scale of a token
    alignas(64) float scaled[4][BLOCK];                      // p in fixed-point units, of a tile's rows
    alignas(64) GroupWeights weights[VALUE_GROUPS];
    alignas(64) float offset[VALUE_GROUPS][4];
    float step[4];
    __mmask16 attended[BLOCK / 16];
  };

  // 32 channels from c on, R rows; stride: channels of a plane
  template <int R, class Stride>
  static __attribute__((noinline)) void multiply(const Layout& l, Stride stride, const Slab* slabs, int count, unsigned c,
                                                 Work& work, Prefetch& prefetch, float* out) {
    const int group = int(c / l.group);
    const __m512i mask = _mm512_set1_epi8((1 << LOW) - 1);
    const __m512i by0 = planes(c, stride, LOW), by1 = planes(c + 16, stride, LOW);
    const auto high_stride = half_of(stride);  // of three bits
    const __m512i high0 = planes(c, high_stride, 1), high1 = planes(c + 16, high_stride, 1);
    __m512i sums[CHAINS<R>][R * PARTS][2];
    auto& acc = sums[0];
    unroll<CHAINS<R>>([&](auto chain) KVQ_LAMBDA {
      unroll<R * PARTS>([&](auto x) KVQ_LAMBDA { sums[chain][x][0] = sums[chain][x][1] = _mm512_setzero_si512(); });
    });
    for (int s = 0; s < count; ++s) {
      const uint8_t* codes = slabs[s].data + l.v_codes;
      const uint8_t *w0 = codes + c % stride * 4, *w1 = codes + (c + 16) % stride * 4;
      const uint8_t* h0 = slabs[s].data + l.v_high + c % high_stride * 4;
      const uint8_t* h1 = slabs[s].data + l.v_high + (c + 16) % high_stride * 4;
      const int8_t* weights = work.weights[group][0][0] + s * SLAB;
      const char* ahead = prefetch.take<SLAB / 4>();  // at once: a branch amid the sums would move them about
      unroll<SLAB / 4>([&](auto token_quad) KVQ_LAMBDA {
        __m512i c0 = _mm512_and_si512(_mm512_srlv_epi32(load_words(w0 + token_quad * stride * 4, c, stride), by0), mask);
        __m512i c1 = _mm512_and_si512(_mm512_srlv_epi32(load_words(w1 + token_quad * stride * 4, c + 16, stride), by1), mask);
        if constexpr (BITS == 3) {
          c0 = with_third_bit(c0, load_words(h0 + token_quad * high_stride * 4, c, high_stride), high0);
          c1 = with_third_bit(c1, load_words(h1 + token_quad * high_stride * 4, c + 16, high_stride), high1);
        }
        __builtin_prefetch(ahead + 64 * token_quad, 0, 3);
        unroll<R * PARTS>([&](auto x) KVQ_LAMBDA {
          constexpr int part = x / R, r = x % R;
          const __m512i b = quad(weights + (part * 4 + r) * BLOCK + token_quad * 4);
          dot(sums[token_quad % CHAINS<R>][x][0], c0, b);
          dot(sums[token_quad % CHAINS<R>][x][1], c1, b);
        });
      });
    }
    add_chains(sums);
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m512 step = _mm512_set1_ps(work.step[r]), offset = _mm512_set1_ps(work.offset[group][r]);
      for (int half = 0; half < 2; ++half) {
        float* to = out + r * l.d + half * 16;
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(to), offset);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(to_reals(join(acc[r][half], acc[R + r][half])), step, sum));
      }
    });
  }
};

template <int BITS, bool SEARCHED = false>
struct TokenValues : TokenProducts<BITS> {
  using Products = TokenProducts<BITS>;
  using typename Products::Work;
  using Weights = TokenWeights<BITS, SEARCHED>;

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void add(Task& task, const Slab* slabs, int count) {
    Work& work = *reinterpret_cast<Work*>(task.value_work);
    const Layout& l = *task.layout;
    Weights::find_attended(slabs, count, work.attended);
    const int groups = Weights::groups_of(l);  // a division, and what follows writes bytes, which may be anything
    Weights::find_widest(l, slabs, count, groups, work.attended, work.widest);
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      Weights::template scale_weights<R>(l, task.scores + row * BLOCK, count, work.widest, work.scaled[0], work.step);
      for (int g = 0; g < groups; ++g)
        Weights::template weigh<R>(l, slabs, count, g, work.attended, work.scaled[0], work.step, work.weights[g],
                                   work.offset[g]);
      by_stride<Products::LOW>(l.d, [&](auto stride) KVQ_LAMBDA {
        for (int c = 0; c < l.d; c += 32)
          Products::template multiply<R>(l, stride, slabs, count, c, work, task.prefetch, task.out + row * l.d + c);
      });
    });
  }
};

}  // namespace integer
}  // namespace

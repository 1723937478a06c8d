// Per-token values: one scale and zero per token and group of channels.
//
//     sum_t p_t v_tc = sum_t (p_t scale_tg) code_tc + sum_t p_t zero_tg          g = the group of channel c
//
// The scales go into the softmax weights once per block, which then become fixed point per row and group. Channels
// are taken 32 at a time: two vectors of 16, which share their weights because groups are multiples of 32.
#pragma once

#include "../kernel.h"
#include "softmax.h"

namespace {
namespace avx512 {

using namespace kvq;

template <int BITS>
struct TokenValues {
  static constexpr int PARTS = 2, GROUPS = 8;

  struct Work {
    alignas(64) float widest[BLOCK];                         // the largest scale of a token
    alignas(64) float scaled[4][BLOCK];                      // p in fixed-point units, of a tile's rows
    alignas(64) int8_t weights[GROUPS][PARTS][4][BLOCK];
    alignas(64) float offset[GROUPS][4];
    float step[4];
    __mmask16 attended[BLOCK / 16];
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static int groups_of(const Layout& l) { return int((l.d + l.group - 1) / l.group); }

  static void add(Task& task, const Slab* slabs, int count) {
    Work& work = *reinterpret_cast<Work*>(task.value_work);
    const Layout& l = *task.layout;
    attended_tokens(slabs, count, work.attended);
    find_widest(l, slabs, count, work);
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      scale_weights<R>(task, row, count, work);
      for (int g = 0; g < groups_of(l); ++g) weigh<R>(l, slabs, count, g, work);
      for (int c = 0; c < l.d; c += 32) multiply<R>(l, slabs, count, c, work, task.prefetch, task.out + row * l.d + c);
    });
  }

  // 16 tokens' parameters of a group; 0 where unattended: their weight is 0, but 0 times NaN would not be
  KVQ_INLINE static __m512 parameters(const Slab* slabs, int64_t at, int group, int i, const Work& work) {
    const uint8_t* p = slabs[i / 2].data + at + (group * SLAB + i % 2 * 16) * 2;
    return _mm512_maskz_cvtph_ps(work.attended[i], _mm256_loadu_si256((const __m256i*)p));
  }

  static void find_widest(const Layout& l, const Slab* slabs, int count, Work& work) {
    for (int i = 0; i < 2 * count; ++i) {
      __m512 widest = parameters(slabs, l.value_at[1], 0, i, work);
      for (int g = 1; g < groups_of(l); ++g) widest = _mm512_max_ps(widest, parameters(slabs, l.value_at[1], g, i, work));
      _mm512_store_ps(work.widest + 16 * i, widest);
    }
  }

  // The fixed-point unit of a row follows its largest p * scale, not the largest scale: an outlier token that nobody
  // looks at must not cost the others their precision.
  template <int R>
  KVQ_INLINE static void scale_weights(const Task& task, int row, int count, Work& work) {
    const float* p = task.scores + row * BLOCK;
    __m512 largest[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = _mm512_setzero_ps(); });
    for (int t = 0; t < count * SLAB; t += 16) {
      const __m512 widest = _mm512_load_ps(work.widest + t);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        largest[r] = _mm512_max_ps(largest[r], _mm512_mul_ps(_mm512_load_ps(p + r * BLOCK + t), widest));
      });
    }
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE<PARTS>), top));
    _mm_storeu_ps(work.step, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE<PARTS>)));
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m512 factor = _mm512_set1_ps(factors[r]);
      for (int t = 0; t < (count + 1) / 2 * 64; t += 16)
        _mm512_store_ps(work.scaled[r] + t, _mm512_mul_ps(_mm512_load_ps(p + r * BLOCK + t), factor));
    });
  }

  template <int R>
  KVQ_INLINE static void weigh(const Layout& l, const Slab* slabs, int count, int g, Work& work) {
    const __m512 magic = _mm512_set1_ps(MAGIC<PARTS>);
    __m512 zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { zeros[r] = _mm512_setzero_ps(); });
    for (int t = 0; t < count * SLAB; t += 64) {
      __m512 scale[4], zero[4];
      unroll<4>([&](auto v) KVQ_LAMBDA {
        const int i = t / 16 + v;
        const bool there = i < 2 * count;
        scale[v] = there ? parameters(slabs, l.value_at[1], g, i, work) : _mm512_setzero_ps();
        zero[v] = there ? parameters(slabs, l.value_at[2], g, i, work) : _mm512_setzero_ps();
      });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        __m512 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m512 p = _mm512_load_ps(work.scaled[r] + t + 16 * v);
          zeros[r] = _mm512_fmadd_ps(p, zero[v], zeros[r]);
          x[v] = _mm512_fmadd_ps(p, scale[v], magic);
        });
        pack4<PARTS>(x, work.weights[g][0][r] + t, work.weights[g][1][r] + t);
      });
    }
    _mm_store_ps(work.offset[g], _mm_mul_ps(reduce4<Add>(zeros), _mm_loadu_ps(work.step)));
  }

  // 32 channels from c on, R rows
  template <int R>
  static __attribute__((noinline)) void multiply(const Layout& l, const Slab* slabs, int count, int c,
                                                 Work& work, Prefetch& prefetch, float* out) {
    const int64_t stride = l.d * BITS / 8;  // channels of a plane
    const int group = int(c / l.group);
    const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
    const __m512i by0 = _mm512_set1_epi32(int(c / stride) * BITS);
    const __m512i by1 = _mm512_set1_epi32(int((c + 16) / stride) * BITS);
    __m512i sums[CHAINS<R>][R * PARTS][2];
    auto& acc = sums[0];
    unroll<CHAINS<R>>([&](auto chain) KVQ_LAMBDA {
      unroll<R * PARTS>([&](auto x) KVQ_LAMBDA { sums[chain][x][0] = sums[chain][x][1] = _mm512_setzero_si512(); });
    });
    for (int s = 0; s < count; ++s) {
      const uint8_t* codes = slabs[s].data + l.value_at[0];
      const uint8_t *w0 = codes + c % stride * 4, *w1 = codes + (c + 16) % stride * 4;
      const int8_t* weights = work.weights[group][0][0] + s * SLAB;
      unroll<SLAB / 4>([&](auto token_quad) KVQ_LAMBDA {
        const __m512i c0 = _mm512_and_si512(_mm512_srlv_epi32(load_bytes(w0 + token_quad * stride * 4), by0), mask);
        const __m512i c1 = _mm512_and_si512(_mm512_srlv_epi32(load_bytes(w1 + token_quad * stride * 4), by1), mask);
        prefetch.lines<1>();
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
        _mm512_storeu_ps(to, _mm512_fmadd_ps(join(acc[r][half], acc[R + r][half]), step, sum));
      }
    });
  }
};

}  // namespace avx512
}  // namespace

//     sum_t p_t v_tc = sum_t (p_t scale_tg) code_tc + sum_t p_t zero_tg          g: the group of channel c
//
// Values per token (formats/methods/values.py): one scale and one zero per token and group of channels. The scales are
// multiplied into the softmax weights once per block, which are then rounded to fixed point per row and group. 32
// channels are taken at a time, as two vectors that share their weights because groups are multiples of 32.
//
// This kernel has a twin in ../avx2. As one source, g++ 12 spilled the sums of the VNNI kernel: squat2 rose from 0.406
// to 0.416 instructions per cached element with 4 query heads, and from 0.197 to 0.214 with one.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "softmax.h"

namespace {
namespace integer {

using namespace kvq;

// What does not depend on whether a token's zero is stored.
template <int BITS>
struct TokenProducts {
  static constexpr int LOW = BITS == 3 ? 2 : BITS;  // bits in v_codes; a third one is in v_high
  static constexpr int GROUPS = LARGEST_HEAD / 32;

  struct Work {
    alignas(64) float widest[BLOCK];                         // the largest scale of a token
    alignas(64) float scaled[4][BLOCK];                      // p in fixed-point units, of a tile's rows
    alignas(64) int8_t weights[GROUPS][PARTS][4][BLOCK];
    alignas(64) float offset[GROUPS][4];
    float step[4];
    __mmask16 attended[BLOCK / 16];
  };

  // 32 channels from c on, R rows; stride: channels of a plane
  template <int R, class Stride>
  static __attribute__((noinline)) void multiply(const Layout& l, Stride stride, const Slab* slabs, int count, int c,
                                                 Work& work, Prefetch& prefetch, float* out) {
    const int group = int(c / l.group);
    const __m512i mask = _mm512_set1_epi8((1 << LOW) - 1);
    const __m512i by0 = _mm512_set1_epi32(int(c / stride) * LOW);
    const __m512i by1 = _mm512_set1_epi32(int((c + 16) / stride) * LOW);
    const auto high_stride = stride / 2;  // of three bits
    const __m512i high0 = L::planes(c, high_stride), high1 = L::planes(c + 16, high_stride);
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
        __m512i c0 = _mm512_and_si512(_mm512_srlv_epi32(L::load_bytes(w0 + token_quad * stride * 4), by0), mask);
        __m512i c1 = _mm512_and_si512(_mm512_srlv_epi32(L::load_bytes(w1 + token_quad * stride * 4), by1), mask);
        if constexpr (BITS == 3) {
          c0 = with_third_bit(c0, L::load_plane(h0 + token_quad * high_stride * 4, high_stride), high0);
          c1 = with_third_bit(c1, L::load_plane(h1 + token_quad * high_stride * 4, high_stride), high1);
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
  static constexpr float MIDDLE = -0.5f * ((1 << BITS) - 1);  // of the codes

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static int groups_of(const Layout& l) { return int((l.d + l.group - 1) / l.group); }

  static void add(Task& task, const Slab* slabs, int count) {
    Work& work = *reinterpret_cast<Work*>(task.value_work);
    const Layout& l = *task.layout;
    attended_tokens(slabs, count, work.attended);
    if (count % 2) work.attended[2 * count] = work.attended[2 * count + 1] = 0;
    const int groups = groups_of(l);  // a division, and what follows writes bytes, which may be anything
    find_widest(l, slabs, count, groups, work);
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      scale_weights<R>(task, row, count, work);
      for (int g = 0; g < groups; ++g) weigh<R>(l, slabs, count, g, work);
      by_stride<Products::LOW>(l.d, [&](auto stride) KVQ_LAMBDA {
        for (int c = 0; c < l.d; c += 32)
          Products::template multiply<R>(l, stride, slabs, count, c, work, task.prefetch, task.out + row * l.d + c);
      });
    });
  }

  // 16 tokens' parameters; 0 where unattended: their weight is 0, but 0 times NaN would not be
  KVQ_INLINE static __m512 parameters(const uint8_t* p, __mmask16 attended) {
    return _mm512_maskz_cvtph_ps(attended, _mm256_loadu_si256((const __m256i*)p));
  }

  static void find_widest(const Layout& l, const Slab* slabs, int count, int groups, Work& work) {
    for (int s = 0; s < count; ++s) {
      const uint8_t* p = slabs[s].data + l.v_scale;
      const __mmask16 first = work.attended[2 * s], second = work.attended[2 * s + 1];
      __m512 widest[2] = {parameters(p, first), parameters(p + 32, second)};
      for (int g = 1; g < groups; ++g) {
        p += SLAB * 2;
        widest[0] = _mm512_max_ps(widest[0], parameters(p, first));
        widest[1] = _mm512_max_ps(widest[1], parameters(p + 32, second));
      }
      _mm512_store_ps(work.widest + s * SLAB, widest[0]);
      _mm512_store_ps(work.widest + s * SLAB + 16, widest[1]);
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
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    const float unit = SEARCHED ? float(task.layout->value_step) : 1.0f;
    _mm_storeu_ps(work.step, _mm_mul_ps(top, _mm_set1_ps(unit / RANGE)));
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m512 factor = _mm512_set1_ps(factors[r]);
      for (int t = 0; t < (count + 1) / 2 * 64; t += 16)
        _mm512_store_ps(work.scaled[r] + t, _mm512_mul_ps(_mm512_load_ps(p + r * BLOCK + t), factor));
    });
  }

  template <int R>
  KVQ_INLINE static void weigh(const Layout& l, const Slab* slabs, int count, int g, Work& work) {
    const __m512 magic = _mm512_set1_ps(MAGIC);
    __m512 zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { zeros[r] = _mm512_setzero_ps(); });
    for (int s = 0; s < count; s += 2) {
      const int t = s * SLAB;
      // without a second slab nothing of it is attended
      const uint8_t* data[2] = {slabs[s].data + g * SLAB * 2, slabs[s + 1 < count ? s + 1 : s].data + g * SLAB * 2};
      __m512 scale[4], zero[4];
      unroll<4>([&](auto v) KVQ_LAMBDA {
        const __mmask16 attended = work.attended[2 * s + v];
        scale[v] = parameters(data[v / 2] + l.v_scale + v % 2 * 32, attended);
        if constexpr (SEARCHED)
          zero[v] = _mm512_mul_ps(scale[v], _mm512_set1_ps(MIDDLE));
        else
          zero[v] = parameters(data[v / 2] + l.v_zero + v % 2 * 32, attended);
      });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        __m512 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m512 p = _mm512_load_ps(work.scaled[r] + t + 16 * v);
          zeros[r] = _mm512_fmadd_ps(p, zero[v], zeros[r]);
          x[v] = _mm512_fmadd_ps(p, scale[v], magic);
        });
        pack(x, work.weights[g][0][r] + t, work.weights[g][1][r] + t);
      });
    }
    _mm_store_ps(work.offset[g], _mm_mul_ps(reduce4<Add>(zeros), _mm_loadu_ps(work.step)));
  }
};

}  // namespace integer
}  // namespace

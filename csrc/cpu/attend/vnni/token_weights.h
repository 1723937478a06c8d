//     w_tg = p_t scale_tg in fixed point,  z_g = sum_t p_t zero_tg          g: a group of channels
//
// What softmax weights become before they meet the codes of values per token. The fixed-point unit of a row follows its
// largest p * scale, not the largest scale: an outlier token that nobody looks at must not cost the others their precision.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "softmax.h"

namespace {
namespace integer {

using namespace kvq;

constexpr int VALUE_GROUPS = LARGEST_HEAD / 32;

// Four rows of a group.
using GroupWeights = int8_t[PARTS][4][BLOCK];

// SEARCHED: a token's zero is not stored, but is the middle of the codes.
template <int BITS, bool SEARCHED>
struct TokenWeights {
  static constexpr float MIDDLE = -0.5f * ((1 << BITS) - 1);

  static int groups_of(const Layout& l) { return int((l.d + l.group - 1) / l.group); }

  // 16 tokens' parameters; 0 where unattended: their weight is 0, but 0 times NaN would not be
  KVQ_INLINE static __m512 parameters(const uint8_t* p, __mmask16 attended) {
    return _mm512_maskz_cvtph_ps(attended, _mm256_loadu_si256((const __m256i*)p));
  }

  // The scales of group g of a slab's tokens, from one of the vectors on; searched ones are bytes.
  KVQ_INLINE static __m512 scales(const Layout& l, const uint8_t* slab, int vector, int g, __mmask16 attended) {
    const uint8_t* p = slab + l.v_scale;
    if (SEARCHED) return L::only(attended, L::load_scales(p + 16 * vector));
    return parameters(p + g * SLAB * 2 + 32 * vector, attended);
  }

  static void find_attended(const Slab* slabs, int count, __mmask16* attended) {
    attended_tokens(slabs, count, attended);
    if (count % 2) attended[2 * count] = attended[2 * count + 1] = 0;
  }

  // widest[token]: the largest scale
  static void find_widest(const Layout& l, const Slab* slabs, int count, int groups, const __mmask16* attended,
                          float* widest) {
    for (int s = 0; s < count; ++s) {
      const uint8_t* p = slabs[s].data;
      const __mmask16 first = attended[2 * s], second = attended[2 * s + 1];
      __m512 largest[2] = {scales(l, p, 0, 0, first), scales(l, p, 1, 0, second)};
      for (int g = 1; g < groups; ++g) {
        largest[0] = _mm512_max_ps(largest[0], scales(l, p, 0, g, first));
        largest[1] = _mm512_max_ps(largest[1], scales(l, p, 1, g, second));
      }
      _mm512_store_ps(widest + s * SLAB, largest[0]);
      _mm512_store_ps(widest + s * SLAB + 16, largest[1]);
    }
  }

  // scaled[R][BLOCK]: p, which may lie there, in units of `step`, which has 4 numbers
  template <int R>
  KVQ_INLINE static void scale_weights(const Layout& l, const float* p, int count, const float* widest, float* scaled,
                                       float* step) {
    __m512 largest[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = _mm512_setzero_ps(); });
    for (int t = 0; t < count * SLAB; t += 16) {
      const __m512 w = _mm512_load_ps(widest + t);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        largest[r] = _mm512_max_ps(largest[r], _mm512_mul_ps(_mm512_load_ps(p + r * BLOCK + t), w));
      });
    }
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    const float unit = SEARCHED ? float(l.value_step) : 1.0f;
    _mm_storeu_ps(step, _mm_mul_ps(top, _mm_set1_ps(unit / RANGE)));
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m512 factor = _mm512_set1_ps(factors[r]);
      for (int t = 0; t < (count + 1) / 2 * 64; t += 16)
        _mm512_store_ps(scaled + r * BLOCK + t, _mm512_mul_ps(_mm512_load_ps(p + r * BLOCK + t), factor));
    });
  }

  // `offset` gets 4 numbers.
  template <int R>
  KVQ_INLINE static void weigh(const Layout& l, const Slab* slabs, int count, int g, const __mmask16* attended,
                               const float* scaled, const float* step, GroupWeights& weights, float* offset) {
    const __m512 magic = _mm512_set1_ps(MAGIC);
    __m512 zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { zeros[r] = _mm512_setzero_ps(); });
    for (int s = 0; s < count; s += 2) {
      const int t = s * SLAB;
      // without a second slab nothing of it is attended
      const uint8_t* data[2] = {slabs[s].data, slabs[s + 1 < count ? s + 1 : s].data};
      __m512 scale[4], zero[4];
      unroll<4>([&](auto v) KVQ_LAMBDA {
        scale[v] = scales(l, data[v / 2], v % 2, g, attended[2 * s + v]);
        if constexpr (SEARCHED)
          zero[v] = _mm512_mul_ps(scale[v], _mm512_set1_ps(MIDDLE));
        else
          zero[v] = parameters(data[v / 2] + l.v_zero + g * SLAB * 2 + v % 2 * 32, attended[2 * s + v]);
      });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        __m512 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m512 p = _mm512_load_ps(scaled + r * BLOCK + t + 16 * v);
          zeros[r] = _mm512_fmadd_ps(p, zero[v], zeros[r]);
          x[v] = _mm512_fmadd_ps(p, scale[v], magic);
        });
        pack(x, weights[0][r] + t, weights[1][r] + t);
      });
    }
    _mm_storeu_ps(offset, _mm_mul_ps(reduce4<Add>(zeros), _mm_loadu_ps(step)));
  }
};

}  // namespace integer
}  // namespace

// Sine and cosine of 16 angles up to a few turns, absolute error 3e-7.
#pragma once

#include "../../isa/lanes.h"

namespace {
namespace integer {

// |r| <= pi/4: Taylor series of both.
KVQ_INLINE void small_sine_cosine(__m512 r, __m512& sine, __m512& cosine) {
  const __m512 z = _mm512_mul_ps(r, r);
  __m512 s = _mm512_set1_ps(-1.9515295891e-4f);
  s = _mm512_fmadd_ps(s, z, _mm512_set1_ps(8.3321608736e-3f));
  s = _mm512_fmadd_ps(s, z, _mm512_set1_ps(-1.6666654611e-1f));
  sine = _mm512_fmadd_ps(_mm512_mul_ps(s, z), r, r);
  __m512 c = _mm512_set1_ps(2.443315711809948e-5f);
  c = _mm512_fmadd_ps(c, z, _mm512_set1_ps(-1.388731625493765e-3f));
  c = _mm512_fmadd_ps(c, z, _mm512_set1_ps(4.166664568298827e-2f));
  cosine = _mm512_fmadd_ps(_mm512_mul_ps(c, z), z, _mm512_fnmadd_ps(_mm512_set1_ps(0.5f), z, _mm512_set1_ps(1.0f)));
}

// x = n pi/2 + r: both of r, then swapped and signed by the quadrant n mod 4.
KVQ_INLINE void sine_cosine(__m512 x, __m512& sine, __m512& cosine) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.636619772f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.57079625f), x);  // pi/2 in two floats
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(7.54978995e-8f), r);
  __m512 s, c;
  small_sine_cosine(r, s, c);
  const __m512i quadrant = _mm512_cvtps_epi32(n), one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2);
  const __mmask16 swap = _mm512_test_epi32_mask(quadrant, one);
  const __m512i negative_sine = _mm512_slli_epi32(_mm512_and_si512(quadrant, two), 30);
  const __m512i negative_cosine = _mm512_slli_epi32(_mm512_and_si512(_mm512_add_epi32(quadrant, one), two), 30);
  const auto flip = [](__m512 v, __m512i sign) KVQ_LAMBDA {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), sign));
  };
  sine = flip(_mm512_mask_mov_ps(s, swap, c), negative_sine);
  cosine = flip(_mm512_mask_mov_ps(c, swap, s), negative_cosine);
}

}  // namespace integer
}  // namespace

// Sine and cosine of 8 angles up to a few turns, absolute error 3e-7.
#pragma once

#include "../../isa/lanes8.h"

namespace {
namespace integer {

// x = n pi/2 + r, |r| <= pi/4: Taylor series of both in r, then swapped and signed by the quadrant n mod 4.
KVQ_INLINE void sine_cosine(__m256 x, __m256& sine, __m256& cosine) {
  const auto set = [](float v) __attribute__((always_inline)) { return _mm256_set1_ps(v); };
  const __m256 n = rounded(_mm256_mul_ps(x, set(0.636619772f)));
  __m256 r = _mm256_fnmadd_ps(n, set(1.57079625f), x);  // pi/2 in two floats
  r = _mm256_fnmadd_ps(n, set(7.54978995e-8f), r);
  const __m256 z = _mm256_mul_ps(r, r);
  __m256 s = _mm256_fmadd_ps(set(-1.9515295891e-4f), z, set(8.3321608736e-3f));
  s = _mm256_fmadd_ps(s, z, set(-1.6666654611e-1f));
  s = _mm256_fmadd_ps(_mm256_mul_ps(s, z), r, r);
  __m256 c = _mm256_fmadd_ps(set(2.443315711809948e-5f), z, set(-1.388731625493765e-3f));
  c = _mm256_fmadd_ps(c, z, set(4.166664568298827e-2f));
  c = _mm256_fmadd_ps(_mm256_mul_ps(c, z), z, _mm256_fnmadd_ps(set(0.5f), z, set(1.0f)));
  const __m256i quadrant = _mm256_cvtps_epi32(n), one = _mm256_set1_epi32(1), two = _mm256_set1_epi32(2);
  const __m256 swap = _mm256_castsi256_ps(_mm256_slli_epi32(quadrant, 31));  // blendv looks at the sign bit
  const __m256i negative_sine = _mm256_slli_epi32(_mm256_and_si256(quadrant, two), 30);
  const __m256i negative_cosine = _mm256_slli_epi32(_mm256_and_si256(_mm256_add_epi32(quadrant, one), two), 30);
  sine = _mm256_xor_ps(_mm256_blendv_ps(s, c, swap), _mm256_castsi256_ps(negative_sine));
  cosine = _mm256_xor_ps(_mm256_blendv_ps(c, s, swap), _mm256_castsi256_ps(negative_cosine));
}

}  // namespace integer
}  // namespace

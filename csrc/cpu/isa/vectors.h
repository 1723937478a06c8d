// Vectors of the instruction set that this translation unit is compiled for, through the vector extension that g++
// and clang share. KVQ_LANES floats each.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include "intrinsics.h"
#endif

namespace {

constexpr int LANES = KVQ_LANES;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// not 0 + x, which is a sum, for -0
inline Floats splat(float x) { return x - Floats{}; }

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

using Quad = float __attribute__((vector_size(16)));

inline Quad quad_of(Floats v, int i) {
  Quad q;
  std::memcpy(&q, reinterpret_cast<const char*>(&v) + 16 * i, 16);
  return q;
}

// Across lanes as a tree, whose dependency chain is short: one lane after the other would wait for each step.
inline Quad sum_quads(Floats v) {
  Quad s = quad_of(v, 0);
  for (int i = 1; i < LANES / 4; ++i) s += quad_of(v, i);
  return s;
}

inline float sum(Floats v) {
  const Quad s = sum_quads(v);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

// Across 4 vectors side by side; any others one by one.
template <int N>
inline void sum_each(const Floats (&v)[N], float* sums) {
#ifdef __SSE3__
  if constexpr (N == 4) {
    const auto quad = [&](int i) { return __m128(sum_quads(v[i])); };
    return _mm_storeu_ps(sums, _mm_hadd_ps(_mm_hadd_ps(quad(0), quad(1)), _mm_hadd_ps(quad(2), quad(3))));
  }
#endif
  for (int i = 0; i < N; ++i) sums[i] = sum(v[i]);
}

inline float largest(Floats v) {
  Quad m = quad_of(v, 0);
  for (int i = 1; i < LANES / 4; ++i) m = quad_of(v, i) > m ? quad_of(v, i) : m;
  const float a = m[0] > m[2] ? m[0] : m[2], b = m[1] > m[3] ? m[1] : m[3];
  return a > b ? a : b;
}

// 2^x for x <= 0, relative error 2e-7; 0 below -126.
inline Floats exp2(Floats x) {
  const Floats clamped = max(x, splat(-126.0f));
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Floats shifted = clamped + magic;
  const Floats f = clamped - (shifted - magic);
  Floats p = splat(1.33335581e-3f);
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  uint32_t __attribute__((vector_size(4 * LANES))) bits, n;  // unsigned: of NaN the sum wraps
  std::memcpy(&bits, &p, sizeof p);
  std::memcpy(&n, &shifted, sizeof n);
  bits += n << 23;  // the low bits of the magic sum are the integer; those of magic itself shift out
  std::memcpy(&p, &bits, sizeof p);
  return x < splat(-126.0f) ? Floats{} : p;
}

}  // namespace

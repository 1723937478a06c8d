// Vectors of the instruction set that this translation unit is compiled for, through the vector extension that g++
// and clang share. KVQ_LANES floats each.
#pragma once

#include <cstdint>
#include <cstring>

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

inline float sum(Floats v) {
  float s = 0;
  for (int i = 0; i < LANES; ++i) s += v[i];
  return s;
}

inline float largest(Floats v) {
  float m = v[0];
  for (int i = 1; i < LANES; ++i) m = v[i] > m ? v[i] : m;
  return m;
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

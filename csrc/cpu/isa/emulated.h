// AVX-512 in AVX2's instructions, from SIMDe (0.8 or later), with what SIMDe does not have, and with masked loads and
// stores that touch no byte of other lanes. Only for tests: slow.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>

namespace {
namespace emulated {

template <class To, class From>
inline To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "bits of another size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

template <class T>
struct Lanes {
  T of[64 / sizeof(T)];
};

inline float first(__m512 x) { return bits<Lanes<float>>(x).of[0]; }

inline __m512 halves_to_floats(__mmask16 lanes, __m256i x) { return _mm512_maskz_mov_ps(lanes, _mm512_cvtph_ps(x)); }

inline __m256i saturated(__m512i x) { return _mm512_cvtepi32_epi16(_mm512_min_epu32(x, _mm512_set1_epi32(65535))); }

inline __m512i multiply_high(__m512i a, __m512i b) {
  auto x = bits<Lanes<uint16_t>>(a);
  const auto y = bits<Lanes<uint16_t>>(b);
  for (int i = 0; i < 32; ++i) x.of[i] = uint16_t(uint32_t(x.of[i]) * y.of[i] >> 16);
  return bits<__m512i>(x);
}

inline bool has(__mmask16 lanes, int i) { return lanes >> i & 1; }

template <class Vector>
inline Vector load(Vector otherwise, __mmask16 lanes, const void* from) {
  auto x = bits<Lanes<int32_t>>(otherwise);
  for (int i = 0; i < 16; ++i)
    if (has(lanes, i)) std::memcpy(x.of + i, static_cast<const int32_t*>(from) + i, 4);
  return bits<Vector>(x);
}
inline __m512i load_ints(__m512i otherwise, __mmask16 lanes, const void* from) { return load(otherwise, lanes, from); }
inline __m512i load_ints_or_zero(__mmask16 lanes, const void* from) { return load(__m512i{}, lanes, from); }
inline __m512 load_floats_or_zero(__mmask16 lanes, const void* from) { return load(__m512{}, lanes, from); }

template <class Vector>
inline void store(void* to, __mmask16 lanes, Vector x) {
  const auto from = bits<Lanes<int32_t>>(x);
  for (int i = 0; i < 16; ++i)
    if (has(lanes, i)) std::memcpy(static_cast<int32_t*>(to) + i, from.of + i, 4);
}

inline void store_low_bytes(void* to, __mmask16 lanes, __m512i x) {
  const auto from = bits<Lanes<int32_t>>(x);
  for (int i = 0; i < 16; ++i)
    if (has(lanes, i)) static_cast<uint8_t*>(to)[i] = uint8_t(from.of[i]);
}

// To the nearest, ties to even; numbers below 2^-126 become zero, as they do in the processor.
inline uint16_t to_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x), magnitude = u & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return uint16_t(u >> 16 | 0x40);
  if (magnitude < 0x00800000) return uint16_t(u >> 16 & 0x8000);
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
inline __m512bh to_bf16(__m512 high, __m512 low) {
  const auto a = bits<Lanes<float>>(low), b = bits<Lanes<float>>(high);
  Lanes<uint16_t> y;
  for (int i = 0; i < 16; ++i) {
    y.of[i] = to_bf16(a.of[i]);
    y.of[i + 16] = to_bf16(b.of[i]);
  }
  return bits<__m512bh>(y);
}

}  // namespace emulated
}  // namespace

#undef _mm512_mask_loadu_epi32
#undef _mm512_maskz_loadu_epi32
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_epi32
#undef _mm512_mask_storeu_ps
#define _mm512_mask_loadu_epi32 emulated::load_ints
#define _mm512_maskz_loadu_epi32 emulated::load_ints_or_zero
#define _mm512_maskz_loadu_ps emulated::load_floats_or_zero
#define _mm512_mask_storeu_epi32 emulated::store
#define _mm512_mask_storeu_ps emulated::store

#define _mm512_cvtss_f32 emulated::first
#define _mm512_maskz_cvtph_ps emulated::halves_to_floats
#define _mm512_cvtusepi32_epi16 emulated::saturated
#define _mm512_mulhi_epu16 emulated::multiply_high
#define _mm512_mask_cvtepi32_storeu_epi8 emulated::store_low_bytes
#define _mm512_cvtne2ps_pbh emulated::to_bf16

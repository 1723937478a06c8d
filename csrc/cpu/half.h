// Half precision without support by compiler or instruction set. The unnamed namespace keeps a copy in each translation
// unit: they are compiled for different instruction sets, and the linker must not choose one of them for all.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

// Shifting puts the exponent in place, multiplying by 2^112 corrects its bias, for subnormal numbers too. Infinities
// and NaNs become large numbers: no packed page holds any.
inline float half_to_float(uint16_t h) {
  const float magnitude = bits_to_float(uint32_t(h & 0x7fff) << 13) * 0x1p112f;
  return bits_to_float(float_to_bits(magnitude) | uint32_t(h & 0x8000) << 16);
}

inline float half_or_nan(uint16_t h) { return (h & 0x7fff) > 0x7c00 ? bits_to_float(0x7fc00000) : half_to_float(h); }

// Round to nearest even, as formats/parts/quant.py's `half`: clamped to the largest finite number. x is no NaN.
inline uint16_t float_to_half(float x) {
  const float magnitude = __builtin_fabsf(x), top = 65504.0f;
  const uint32_t bits = float_to_bits(magnitude < top ? magnitude : top);
  // below 2^-14 the sum with 0.5 has the spacing of half's subnormal numbers, 2^-24
  const uint32_t small = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000u) >> 13;
  return uint16_t((bits < 0x38800000u ? small : normal) | (float_to_bits(x) >> 16 & 0x8000));
}

inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = float_to_bits(x);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bfloat_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }

}  // namespace

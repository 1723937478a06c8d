//     asymmetric:  x ~ lo + code scale        symmetric:  x ~ n scale, |n| < 2^bits
//
// InnerQ's hybrid groups (formats/methods/innerq.py) of 32 elements, each with the mode of the smaller error unless all have the
// same mode: 32 groups side by side in lanes.
#pragma once

#include "affine.h"

namespace {
namespace float32 {

// x [32 elements][stride], columns [0, 32): codes alike, 32 scales (the sign is the mode) and 32 slots. `wanted` is the
// layout's key_mode or value_mode.
inline void hybrid_codes(const float* x, int64_t stride, int bits, int64_t wanted, int32_t* codes,
                         int64_t code_stride, uint8_t* scale, uint8_t* slot) {
  const Floats top = splat(float((1 << bits) - 1));
  for (int c = 0; c < SLAB; c += LANES) {
    Floats lo = load(x + c), hi = lo;
    for (int e = 1; e < SLAB; ++e) {
      const Floats v = load(x + e * stride + c);
      lo = min(lo, v);
      hi = max(hi, v);
    }
    const Floats s = positive_half((hi - lo) / top), wide = positive_half(max(absolute(lo), absolute(hi)) / top);
    Floats affine{}, symmetric{};
    for (int e = 0; e < SLAB; ++e) {
      const Floats v = load(x + e * stride + c);
      const Floats a = (lo + affine_code(v, s, lo, top) * s) - v;
      const Floats b = nearest(max(min(v / wide, top), -top)) * wide - v;
      affine += a * a;
      symmetric += b * b;
    }
    const Ints mode = wanted ? Ints{} - int32_t(wanted == 1) : Ints(symmetric < affine);  // all ones: symmetric
    Ints signs{};
    for (int e = 0; e < SLAB; ++e) {
      const Floats v = load(x + e * stride + c);
      const Floats n = nearest(max(min(v / wide, top), -top));
      const Ints code = (mode & to_ints(n) & ((1 << bits) - 1)) | (~mode & to_ints(affine_code(v, s, lo, top)));
      std::memcpy(codes + e * code_stride + c, &code, sizeof code);
      signs |= Ints(n >= Floats{}) & int32_t(1u << (8 * (e % 4) + e / 4));
    }
    store_halves(scale + 2 * c, floats((mode & bits_of(-wide)) | (~mode & bits_of(s))));
    const Ints word = (mode & signs) | (~mode & bits_of(lo));
    std::memcpy(slot + 4 * c, &word, sizeof word);
  }
}

inline void pack_hybrid_values(const Layout& l, const float* value, uint8_t* slab, char* work) {
  int32_t* codes = reinterpret_cast<int32_t*>(work);
  for (int64_t c = 0; c < l.d; c += SLAB)
    hybrid_codes(value + c, l.d, int(l.value_bits), l.value_mode, codes + c, l.d, slab + l.v_scale + 2 * c,
                 slab + l.v_slot + 4 * c);
  put_value_codes(codes, l.d, int(l.value_bits), slab + l.v_codes);
}

// The norm as stored (`usable_norm`): 1 for a dead channel, at least 1/64.
inline Floats usable_norm(Floats norm) { return norm > Floats{} ? max(half(norm), splat(0x1p-6f)) : splat(1.0f); }

inline void pack_hybrid_keys(const PackUnit& u) {
  const Layout& l = *u.layout;
  int32_t* codes = reinterpret_cast<int32_t*>(u.work);  // [32][d]
  float norm[LARGEST_HEAD], block[SLAB * SLAB];
  int32_t turned[SLAB * SLAB];
  uint8_t* stored = u.record + l.k_inner_norm;
  for (int64_t c = 0; c < l.d; c += LANES) {
    Floats n = splat(1.0f);
    if (u.follows) {
      float kept[LANES];
      for (int i = 0; i < LANES; ++i) {
        uint16_t h;
        std::memcpy(&h, stored + 2 * (c + i), 2);
        kept[i] = half_to_float(h);
      }
      n = load(kept);
    } else if (u.state) {
      n = load(u.state + c);
    }
    if (u.follows || u.state) n = usable_norm(n);
    store(norm + c, n);
    if (!u.follows) store_halves(stored + 2 * c, n);
  }
  for (int64_t first = 0; first < l.d; first += SLAB) {
    for (int t = 0; t < SLAB; ++t)
      for (int c = 0; c < SLAB; ++c) block[c * SLAB + t] = u.key[t * l.d + first + c] / norm[first + c];
    hybrid_codes(block, SLAB, int(l.key_bits), l.key_mode, turned, SLAB, u.slabs + l.k_scale + 2 * first,
                 u.slabs + l.k_slot + 4 * first);
    for (int t = 0; t < SLAB; ++t)
      for (int c = 0; c < SLAB; ++c) codes[t * l.d + first + c] = turned[c * SLAB + t];
  }
  put_key_codes(codes, l.d, int(l.key_bits), u.slabs + l.k_codes);
}

}  // namespace float32
}  // namespace

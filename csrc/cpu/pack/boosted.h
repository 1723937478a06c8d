//     code = round(clamp((x - zero) / scale, 0, 2^b - 1))        b = 4 if boosted, else 2
//
// Kitty's keys (formats/kitty.py): of a slab's channels those with the widest range are boosted.
#pragma once

#include "../boosted.h"
#include "affine.h"

namespace {
namespace float32 {

// Which of LANES channels from c on are among the `count` widest, the first of equals; all ones where they are.
inline Ints among_widest(const float* span, int64_t d, int64_t c, int64_t count) {
  const Floats mine = load(span + c);
  Ints channel, wider{};
  for (int i = 0; i < LANES; ++i) channel[i] = int32_t(c) + i;
  for (int64_t other = 0; other < d; ++other) {
    const Floats theirs = splat(span[other]);
    wider -= Ints(theirs > mine) | (Ints(theirs == mine) & Ints(channel > int32_t(other)));
  }
  return Ints(wider < int32_t(count));
}

inline void pack_boosted(const PackUnit& u) {
  const Layout& l = *u.layout;
  const int64_t d = l.d, boosted = l.boosted;
  int32_t *low = reinterpret_cast<int32_t*>(u.work), *high = low + SLAB * d, *gathered = high + SLAB * d;
  uint8_t *scale = u.slabs + l.k_scale, *zero = u.slabs + l.k_zero;
  float least[LARGEST_HEAD], most[LARGEST_HEAD], span[LARGEST_HEAD];
  for (int64_t c = 0; c < d; c += LANES) {
    Floats lo = load(u.key + c), hi = lo;
    for (int t = 1; t < SLAB; ++t) {
      const Floats v = load(u.key + t * d + c);
      lo = min(lo, v);
      hi = max(hi, v);
    }
    store(least + c, lo);
    store(most + c, hi);
    store(span + c, hi - lo);
  }
  for (int64_t c = 0; c < d; c += LANES) {
    const Ints wide = among_widest(span, d, c, boosted);
    const Floats lo = load(least + c), hi = load(most + c), top = wide ? splat(15.0f) : splat(3.0f);
    const Affine few = parameters(u.key + c, SLAB, d, lo, hi, 2, l.key_fitted);
    const Affine many = parameters(u.key + c, SLAB, d, lo, hi, 4, l.key_fitted);
    const Floats s = wide ? many.scale : few.scale, z = wide ? many.zero : few.zero;
    store_halves(scale + 2 * c, floats(bits_of(s) | (wide & int32_t(1u << 31))));
    store_halves(zero + 2 * c, z);
    for (int t = 0; t < SLAB; ++t) {
      const Ints code = to_ints(affine_code(load(u.key + t * d + c), s, z, top)), digits[2] = {code & 3, code >> 2};
      std::memcpy(low + t * d + c, &digits[0], sizeof code);
      std::memcpy(high + t * d + c, &digits[1], sizeof code);
    }
  }
  int32_t channels[LARGEST_HEAD];
  boosted_channels(scale, int(d), int(boosted), channels);
  for (int t = 0; t < SLAB; ++t)
    for (int64_t i = 0; i < boosted; ++i) gathered[t * boosted + i] = high[t * d + channels[i]];
  put_key_codes(low, d, 2, u.slabs + l.k_codes);
  put_key_codes(gathered, boosted, 2, u.slabs + l.k_high);
}

}  // namespace float32
}  // namespace

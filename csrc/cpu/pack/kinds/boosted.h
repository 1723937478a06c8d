//     code = round(clamp((x - zero) / scale, 0, 2^b - 1))        b = 4 if boosted, else 2
//
// Kitty's keys (formats/methods/kitty.py): a slab's channels with the widest range are boosted. SQuat's keys are the same,
// corrected (formats/methods/squat.py); which channels are boosted is decided before that.
#pragma once

#include "../../boosted.h"
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
  float span[LARGEST_HEAD], tops[LARGEST_HEAD];
  for (int64_t c = 0; c < d; c += LANES) {
    Floats lo = load(u.key + c), hi = lo;
    for (int t = 1; t < SLAB; ++t) {
      const Floats v = load(u.key + t * d + c);
      lo = min(lo, v);
      hi = max(hi, v);
    }
    store(span + c, hi - lo);
  }
  for (int64_t c = 0; c < d; c += LANES)
    store(tops + c, among_widest(span, d, c, boosted) ? splat(15.0f) : splat(3.0f));
  int32_t *codes = quantize_channels(u, [&tops](int64_t c) { return load(tops + c); }), *high = codes + SLAB * d;
  uint8_t* scale = u.slabs + l.k_scale;
  for (int64_t c = 0; c < d; ++c) scale[2 * c + 1] |= tops[c] == 15.0f ? 0x80 : 0;  // the sign
  int32_t channels[LARGEST_HEAD];
  boosted_channels(scale, int(d), int(boosted), channels);
  for (int t = 0; t < SLAB; ++t) {
    int32_t* row = codes + t * d;
    for (int64_t i = 0; i < boosted; ++i) high[t * boosted + i] = row[channels[i]] >> 2;
    for (int64_t c = 0; c < d; ++c) row[c] &= 3;
  }
  put_key_codes(codes, d, 2, u.slabs + l.k_codes);
  put_key_codes(high, boosted, 2, u.slabs + l.k_high);
}

}  // namespace float32
}  // namespace

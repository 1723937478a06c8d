//     y = T / s (k - mu)        codes of y, in digits of base 4
//
// Transformed keys (formats/methods/klt.py): each slot is a digit of one channel's code.
#pragma once

#include "search.h"
#include "turning.h"

namespace {
namespace float32 {

// k - mu and y [32][d], codes [32][d], and their digits [32][slots]
inline size_t transformed_work_bytes(const Layout& l) { return align64(4 * size_t(SLAB) * (3 * l.d + l.slots)); }

inline void pack_transformed(const PackUnit& u) {
  const Layout& l = *u.layout;
  const int64_t d = l.d, slots = l.slots;
  const float *weight = u.constants->channels, *step = weight + d, *most = step + d;
  const int32_t *channel = u.constants->places, *shift = channel + slots;
  float *centred = reinterpret_cast<float*>(u.work), *y = centred + SLAB * d;
  int32_t *codes = reinterpret_cast<int32_t*>(y + SLAB * d), *digits = codes + SLAB * d;
  float e[LARGEST_HEAD], mean[LARGEST_HEAD];
  turned(l, turn_at(l, *u.constants, uint32_t(u.position)), e);
  turned_mean(l, *u.constants, e, mean);
  for (int t = 0; t < SLAB; ++t)
    for (int64_t c = 0; c < d; c += LANES) store(centred + t * d + c, load(u.key + t * d + c) - load(mean + c));
  for (int64_t j = 0; j < d; j += SLAB) multiply(centred, d, SLAB, d, u.constants->forward + j * d, SLAB, y + j, d);
  uint8_t* scale = u.slabs + l.k_scale;
  for (int t = 0; t < SLAB; ++t) {
    const int32_t* code = codes + t * d;
    scale[t] = searched(y + t * d, d, {step, most, weight}, codes + t * d);
    for (int64_t i = 0; i < slots; ++i) digits[t * slots + i] = code[channel[i]] >> shift[i] & 3;
  }
  put_key_codes(digits, slots, 2, u.slabs + l.k_codes);
}

}  // namespace float32
}  // namespace

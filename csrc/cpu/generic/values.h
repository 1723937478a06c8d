// Values of every format, unpacked to float32 (see keys.h).
//
//     O[r][c] += sum_t P[r][t] v[t][c]
#pragma once

#include "keys.h"

namespace {
namespace generic {

// Codes of plane-quad values as floats, v[t][c].
inline void unpack_value_codes(const uint8_t* codes, int d, int bits, float* v) {
  const int planes = 8 / bits, stride = d / planes, mask = (1 << bits) - 1;
  for (int quad = 0; quad < SLAB / 4; ++quad)
    for (int plane = 0; plane < planes; ++plane)
      for (int j = 0; j < 4; ++j) {
        const int shift = 8 * j + bits * plane;
        float* row = v + (4 * quad + j) * d + plane * stride;
        for (int c = 0; c < stride; ++c) row[c] = float(int32_t(word(codes, quad * stride + c) >> shift) & mask);
      }
}

inline void unpack_token_values(const Layout& l, const Slab& slab, float* v) {
  unpack_value_codes(slab.data + l.value_at[0], l.d, l.value_bits, v);
  const int groups = (l.d + l.group - 1) / l.group;
  for (int g = 0; g < groups; ++g) {
    float scale[SLAB], zero[SLAB];
    read_halves(slab.data + l.value_at[1] + g * 2 * SLAB, SLAB, scale);
    read_halves(slab.data + l.value_at[2] + g * 2 * SLAB, SLAB, zero);
    const int first = g * l.group, last = first + l.group < l.d ? first + l.group : l.d;
    for (int t = slab.low; t < slab.high; ++t)
      for (int c = first; c < last; ++c) v[t * l.d + c] = zero[t] + v[t * l.d + c] * scale[t];
  }
}

inline void unpack_hybrid_values(const Layout& l, const Slab& slab, float* v) {
  unpack_value_codes(slab.data + l.value_at[0], l.d, l.value_bits, v);
  for (int c = 0; c < l.d; c += SLAB) {
    HybridGroup channels;
    channels.read(slab.data + l.value_at[1] + 2 * c, slab.data + l.value_at[2] + 4 * c, l.value_bits);
    for (int t = 0; t < SLAB; ++t)
      for (int i = 0; i < SLAB; ++i) v[t * l.d + c + i] = channels.value(i, t, int32_t(v[t * l.d + c + i]));
  }
}

inline size_t value_bytes(const Layout& l) { return align64(4 * size_t(l.d) * SLAB); }

inline void add(Task& task, const Slab* slabs, int count) {
  const Layout& l = *task.layout;
  float* v = reinterpret_cast<float*>(task.value_work);
  for (int s = 0; s < count; ++s) {
    const Slab& slab = slabs[s];
    switch (l.values) {
      case Values::token:
        unpack_token_values(l, slab, v);
        break;
      case Values::hybrid:
        unpack_hybrid_values(l, slab, v);
        break;
      case Values::raw:
        read_raw(slab.data + l.value_at[0], l.raw_dtype, l.d * SLAB, v);
        break;
    }
    // only the attended tokens: what the others hold must not reach the output, not even times zero
    const float* p = task.scores + s * SLAB + slab.low;
    for (int c = 0; c < l.d; c += SLAB)
      multiply<true>(p, BLOCK, task.rows, slab.high - slab.low, v + slab.low * l.d + c, l.d, task.out + c, l.d);
  }
}

}  // namespace generic
}  // namespace

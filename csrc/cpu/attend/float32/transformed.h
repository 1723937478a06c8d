//     q . k_t = scale_t sum_c f_c (code_ct - most_c / 2) + sum_i f_d+i e_i        f: a query's features, once per step
//
// Transformed keys (formats/methods/klt.py): a query's features, and a slab's keys unpacked by channel. A slot is
// one digit of a channel's code; e is the slab's (pack/kinds/turning.h).
#pragma once

#include "../../isa/matrix.h"
#include "../../pack/kinds/turning.h"
#include "../../pack/unpack.h"

namespace {
namespace float32 {

// Features [rows][2 d] of queries [rows][d]: those of the channels are products with T^-1 s step, those of e are
//     cosine: q_x b_x + q_y b_y        sine: q_y b_x - q_x b_y        of each pair of channels (x, y)
inline void project_transformed(const Layout& l, const Constants& constants, const float* query, int rows,
                                float* features) {
  const int64_t d = l.d, half = d / 2;
  const int32_t *x = constants.pairs, *y = x + half;
  const float* b = constants.mean;
  for (int64_t c = 0; c < d; c += SLAB)
    multiply(query, d, rows, d, constants.backward + c * d, SLAB, features + c, 2 * d);
  for (int r = 0; r < rows; ++r) {
    const float* q = query + r * d;
    float *cosine = features + (2 * r + 1) * d, *sine = cosine + half;
    for (int64_t i = 0; i < half; ++i) {
      cosine[i] = q[x[i]] * b[x[i]] + q[y[i]] * b[y[i]];
      sine[i] = q[y[i]] * b[x[i]] - q[x[i]] * b[y[i]];
    }
  }
}

// A slab's code - most / 2, [d][32].
inline void unpack_levels(const Layout& l, const Constants& constants, const Slab& slab, float* level) {
  const int32_t *channel = constants.places, *shift = channel + l.slots;
  const float* most = constants.channels + 2 * l.d;
  for (int64_t c = 0; c < l.d; ++c)
    for (int t = 0; t < SLAB; t += LANES) store(level + c * SLAB + t, splat(-0.5f * most[c]));
  unpack_key_codes(slab.data + l.k_codes, int(l.slots), 2, [&](int slot, int t, Ints digit) {
    float* at = level + channel[slot] * SLAB + t;
    store(at, load(at) + to_floats(digit << shift[slot]));
  });
}

// What a slab's codes say: scale (code - most / 2), [d][32].
inline void unpack_transformed(const Layout& l, const Constants& constants, const Slab& slab, float* level) {
  float scale[SLAB];
  read_scales(slab.data + l.k_scale, scale);
  unpack_levels(l, constants, slab, level);
  for (int64_t c = 0; c < l.d; ++c)
    for (int t = 0; t < SLAB; t += LANES) store(level + c * SLAB + t, load(level + c * SLAB + t) * load(scale + t));
}

// e of a slab for each of its tokens, [d][32]
inline void repeat_phases(const Layout& l, const Constants& constants, const Slab& slab, float* to) {
  float e[LARGEST_HEAD];
  turned(l, turn_of(l, constants, slab.page, slab.nth), e);
  for (int64_t i = 0; i < l.d; ++i)
    for (int t = 0; t < SLAB; t += LANES) store(to + i * SLAB + t, splat(e[i]));
}

// The mean of a slab's keys, [d].
inline void slab_mean(const Layout& l, const Constants& constants, const Slab& slab, float* mean) {
  float e[LARGEST_HEAD];
  turned(l, turn_of(l, constants, slab.page, slab.nth), e);
  turned_mean(l, constants, e, mean);
}

// k[c][t] of a slab; `work` has [d][32].
inline void rebuild_transformed(const Layout& l, const Constants& constants, const Slab& slab, float* work, float* k) {
  const int64_t d = l.d;
  float mean[LARGEST_HEAD];
  slab_mean(l, constants, slab, mean);
  for (int64_t c = 0; c < d; ++c)
    for (int t = 0; t < SLAB; t += LANES) store(k + c * SLAB + t, splat(mean[c]));
  unpack_transformed(l, constants, slab, work);
  for (int64_t c = 0; c < d; c += SLAB)
    multiply<true>(constants.backward + c * d, SLAB, int(d), SLAB, work + c * SLAB, SLAB, k, SLAB);
}

}  // namespace float32
}  // namespace

//     bits = sign(S x_in), sign(S' x_out)        norms |x_in|, |x_out|
//
// QJL's keys (formats/methods/qjl.py): the outlier channels of a slab, and the signs and norms of two sketches.
#pragma once

#include "affine.h"

namespace {
namespace float32 {

// Where signs are found.
struct SignRoom {
  float* features;  // [32][32]
  float* panel;     // 32 columns of the sketch, [d][32]
  int32_t* signs;   // [32][m]
};

// inner [32][d], outer [32][32], and the room
inline size_t sketch_work_bytes(const Layout& l) {
  const int64_t most = l.sketch_rows > l.outer_rows ? l.sketch_rows : l.outer_rows;
  return align64(4 * size_t(SLAB) * (2 * l.d + 2 * SLAB + most));
}

// For rows [32][stride] with n entries: float16 norms to `norm`, and sign(S x), S transposed [n][m], to `bits`.
// 32 columns of S at a time are copied together: m floats apart, they would push each other out of the first cache.
inline void put_signs(const float* rows, int64_t stride, int64_t n, const float* sketch, int64_t m, const SignRoom& room,
                      uint8_t* bits, uint8_t* norm) {
  const auto [features, panel, signs] = room;
  float norms[SLAB];
  for (int t = 0; t < SLAB; ++t) {
    Floats square{};
    for (int64_t c = 0; c < stride; c += LANES) {
      const Floats x = load(rows + t * stride + c);
      square += x * x;
    }
    norms[t] = __builtin_sqrtf(sum(square));
  }
  for (int t = 0; t < SLAB; t += LANES) store_halves(norm + 2 * t, load(norms + t));
  for (int64_t j = 0; j < m; j += SLAB) {
    for (int64_t c = 0; c < n; ++c) std::memcpy(panel + c * SLAB, sketch + c * m + j, 4 * SLAB);
    multiply(rows, stride, SLAB, n, panel, SLAB, features, SLAB);
    for (int t = 0; t < SLAB; ++t)
      for (int c = 0; c < SLAB; ++c) signs[t * m + j + c] = features[t * SLAB + c] >= 0;
  }
  put_key_codes(signs, m, 1, bits);
}

// The n channels of the largest norm, ascending: over the prompt where its state counts 32 tokens, else over the slab.
inline void outlier_channels(const float* key, const float* state, int64_t d, int64_t n, uint8_t* index) {
  float norm[LARGEST_HEAD];
  const bool prompt = state && state[d] >= SLAB;
  if (prompt) std::memcpy(norm, state, 4 * size_t(d));
  for (int64_t c = 0; !prompt && c < d; c += LANES) {
    Floats square{};
    for (int t = 0; t < SLAB; ++t) square += load(key + t * d + c) * load(key + t * d + c);
    store(norm + c, square);
  }
  bool taken[LARGEST_HEAD] = {};
  for (int64_t i = 0; i < n; ++i) {
    int64_t best = -1;
    for (int64_t c = 0; c < d; ++c)
      if (!taken[c] && (best < 0 || norm[c] > norm[best])) best = c;
    taken[best] = true;
  }
  for (int64_t c = 0, i = 0; c < d; ++c)
    if (taken[c]) index[i++] = uint8_t(c);
}

inline void pack_sketch(const PackUnit& u) {
  const Layout& l = *u.layout;
  float *inner = reinterpret_cast<float*>(u.work), *outer = inner + SLAB * l.d, *features = outer + SLAB * SLAB;
  float* panel = features + SLAB * SLAB;
  const SignRoom room{features, panel, reinterpret_cast<int32_t*>(panel + l.d * SLAB)};
  uint8_t *bits = u.slabs + l.k_bits, *norm = u.slabs + l.k_norm;
  if (!l.outliers) {
    put_signs(u.key, l.d, l.d, u.constants->sketch, l.sketch_rows, room, bits, norm);
    return;
  }
  uint8_t* index = u.slabs + l.ko_index;
  outlier_channels(u.key, u.state, l.d, l.outliers, index);
  std::memcpy(inner, u.key, 4 * size_t(SLAB) * l.d);
  std::memset(outer, 0, 4 * SLAB * SLAB);
  for (int t = 0; t < SLAB; ++t)
    for (int64_t i = 0; i < l.outliers; ++i) {
      outer[t * SLAB + i] = u.key[t * l.d + index[i]];
      inner[t * l.d + index[i]] = 0;
    }
  put_signs(inner, l.d, l.d, u.constants->sketch, l.sketch_rows, room, bits, norm);
  put_signs(outer, SLAB, l.outliers, u.constants->outer, l.outer_rows, room, u.slabs + l.ko_bits, u.slabs + l.ko_norm);
}

}  // namespace float32
}  // namespace

// Packing for one instruction set: which codec packs which half of a unit (see ../pack.h).
#pragma once

#include "pack_hybrid.h"
#include "pack_polar.h"
#include "pack_scalar.h"
#include "pack_sketch.h"

namespace {
namespace generic {

template <class T, class Widen>
inline int64_t read_clean(const T* from, int64_t head_size, int64_t d, float* to, Widen widen) {
  Ints replaced{};
  const Floats limit = splat(32768.0f);  // LIMIT in formats/quant.py
  for (int64_t c = 0; c < head_size; c += LANES) {
    float raw[LANES];
    for (int i = 0; i < LANES; ++i) raw[i] = widen(from[c + i]);
    const Floats x = load(raw);
    Floats clean = x == x ? x : Floats{};
    clean = clean > limit ? limit : clean;
    clean = clean < -limit ? -limit : clean;
    replaced -= Ints(clean != x);
    store(to + c, clean);
  }
  for (int64_t c = head_size; c < d; ++c) to[c] = 0;
  int64_t count = 0;
  for (int i = 0; i < LANES; ++i) count += replaced[i];
  return count;
}

inline int64_t read_tokens(const void* from, Dtype dtype, int64_t head_size, int64_t d, float* to) {
  switch (dtype) {
    case Dtype::f32:
      return read_clean(static_cast<const float*>(from), head_size, d, to, [](float x) { return x; });
    case Dtype::f16:
      return read_clean(static_cast<const uint16_t*>(from), head_size, d, to, half_exactly);
    default:
      return read_clean(static_cast<const uint16_t*>(from), head_size, d, to, bfloat_to_float);
  }
}

// The lossless ones: elements in the model's own type.
inline void put_raw(float x, Dtype dtype, uint8_t* to, int64_t at) {
  if (dtype == Dtype::f32) {
    std::memcpy(to + 4 * at, &x, 4);
  } else {
    const uint16_t bits = dtype == Dtype::f16 ? float_to_half(x) : float_to_bfloat(x);
    std::memcpy(to + 2 * at, &bits, 2);
  }
}

inline void pack_raw_keys(const PackUnit& u) {
  const Layout& l = *u.layout;
  for (int64_t c = 0; c < l.d; ++c)
    for (int t = 0; t < SLAB; ++t) put_raw(u.key[t * l.d + c], l.raw_dtype, u.slabs + l.k_raw, c * SLAB + t);
}

inline void pack_raw_values(const Layout& l, const float* value, uint8_t* slab) {
  for (int64_t i = 0; i < SLAB * l.d; ++i) put_raw(value[i], l.raw_dtype, slab + l.v_raw, i);
}

inline size_t pack_work_bytes(const Layout& l, int64_t tokens) {
  size_t bytes = scalar_work_bytes(l);
  if (l.keys == Keys::polar) bytes = polar_work_bytes(l, tokens) > bytes ? polar_work_bytes(l, tokens) : bytes;
  if (l.keys == Keys::sketch) bytes = sketch_work_bytes(l) > bytes ? sketch_work_bytes(l) : bytes;
  return bytes;
}

inline void pack_unit(const PackUnit& u) {
  const Layout& l = *u.layout;
  switch (l.keys) {
    case Keys::channel: pack_channel(u); break;
    case Keys::hybrid: pack_hybrid_keys(u); break;
    case Keys::sketch: pack_sketch(u); break;
    case Keys::polar: pack_polar(u); break;
    case Keys::raw: pack_raw_keys(u); break;
  }
  for (int64_t t = 0; t < u.tokens; t += SLAB) {
    uint8_t* slab = u.slabs + t / SLAB * l.slab_bytes;
    const float* value = u.value + t * l.d;
    switch (l.values) {
      case Values::token: pack_token_values(l, value, slab, u.work); break;
      case Values::hybrid: pack_hybrid_values(l, value, slab, u.work); break;
      case Values::raw: pack_raw_values(l, value, slab); break;
    }
  }
}

inline void squares(const float* rows, int count, int64_t d, double* sum) {
  for (int64_t c = 0; c < d; c += 2 * LANES) {
    Floats acc[2] = {};
    for (int k = 0; k < count; ++k)
      for (int v = 0; v < 2; ++v) acc[v] += load(rows + k * d + c + v * LANES) * load(rows + k * d + c + v * LANES);
    for (int v = 0; v < 2; ++v)
      for (int i = 0; i < LANES; ++i) sum[c + v * LANES + i] += double(acc[v][i]);
  }
}

inline void largest_of(const float* rows, int count, int64_t d, float* top) {
  for (int64_t c = 0; c < d; c += 2 * LANES) {
    Floats best[2] = {load(top + c), load(top + c + LANES)};
    for (int k = 0; k < count; ++k)
      for (int v = 0; v < 2; ++v) best[v] = max(best[v], absolute(load(rows + k * d + c + v * LANES)));
    for (int v = 0; v < 2; ++v) store(top + c + v * LANES, best[v]);
  }
}

inline void gram(const float* rows, int count, int64_t d, float* sum) {
  for (int64_t i = 0; i < d; i += 4)
    for (int64_t j = i / SLAB * SLAB; j < d; j += 2 * LANES) {
      Floats acc[4][2] = {};
      for (int k = 0; k < count; ++k) {
        const float* x = rows + k * d;
        const Floats a = load(x + j), b = load(x + j + LANES);
        for (int r = 0; r < 4; ++r) {
          const Floats s = splat(x[i + r]);
          acc[r][0] += s * a;
          acc[r][1] += s * b;
        }
      }
      for (int r = 0; r < 4; ++r)
        for (int v = 0; v < 2; ++v) store(sum + (i + r) * d + j + v * LANES, acc[r][v]);
    }
}

}  // namespace generic
}  // namespace

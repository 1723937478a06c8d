// Packing as one instruction set does it: which codec packs which half of a unit (see dispatch/pack_kernels.h).
#pragma once

#include "kinds/affine.h"
#include "kinds/boosted.h"
#include "kinds/hybrid.h"
#include "kinds/polar.h"
#include "kinds/raw.h"
#include "kinds/search.h"
#include "kinds/sketch.h"
#include "kinds/sums.h"
#include "kinds/transformed.h"

namespace {
namespace float32 {

template <class T, class Widen>
inline int64_t read_clean(const T* from, int64_t head_size, int64_t d, float* to, Widen widen) {
  Ints replaced{};
  const Floats limit = splat(LIMIT);
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

inline size_t pack_work_bytes(const Layout& l, int64_t tokens) {
  size_t bytes = scalar_work_bytes(l);
  if (l.keys == Keys::polar) bytes = polar_work_bytes(l, tokens) > bytes ? polar_work_bytes(l, tokens) : bytes;
  if (l.keys == Keys::sketch) bytes = sketch_work_bytes(l) > bytes ? sketch_work_bytes(l) : bytes;
  if (l.keys == Keys::transformed) bytes = transformed_work_bytes(l) > bytes ? transformed_work_bytes(l) : bytes;
  return bytes;
}

inline void pack_unit(const PackUnit& u) {
  const Layout& l = *u.layout;
  switch (l.keys) {
    case Keys::channel: pack_channel(u); break;
    case Keys::boosted: pack_boosted(u); break;
    case Keys::hybrid: pack_hybrid_keys(u); break;
    case Keys::sketch: pack_sketch(u); break;
    case Keys::polar: pack_polar(u); break;
    case Keys::transformed: pack_transformed(u); break;
    case Keys::raw: pack_raw_keys(u); break;
  }
  for (int64_t t = 0; t < u.tokens; t += SLAB) {
    uint8_t* slab = u.slabs + t / SLAB * l.slab_bytes;
    const float* value = u.value + t * l.d;
    switch (l.values) {
      case Values::token: pack_token_values(l, value, slab, u.work); break;
      case Values::hybrid: pack_hybrid_values(l, value, slab, u.work); break;
      case Values::searched: pack_searched_values(l, value, slab, u.work); break;
      case Values::raw: pack_raw_values(l, value, slab); break;
    }
  }
}

constexpr PackKernels pack_kernels = {read_tokens, pack_work_bytes, pack_unit, gram, squares, largest_of};

}  // namespace float32
}  // namespace

// The lossless codecs (formats/methods/lossless.py, values.py): elements in the model's own type.
#pragma once

#include "../../half.h"
#include "../../dispatch/pack_kernels.h"

namespace {
namespace float32 {

using namespace kvq;

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

}  // namespace float32
}  // namespace

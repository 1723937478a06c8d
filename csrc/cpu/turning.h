//     e(n) = cos(a theta_i), sin(a theta_i)        a = 32 n + 31/2, n the slab among the request's
//
// Keys whose mean RoPE turns (formats/parts/turning.py): a slab's mean is a product with e(n), which two tables give by
// the angle sum formulas.
#pragma once

#include "isa/vectors.h"
#include "layout.h"

namespace {
namespace float32 {

// n of a slab, as its page tells: any number, if the page is damaged
inline uint32_t slab_number(const uint8_t* page, int64_t nth) {
  uint32_t position;
  std::memcpy(&position, page + kvq::POSITION_AT, 4);
  return position / kvq::SLAB + uint32_t(nth);
}

// e [d]
inline void turned(const kvq::Layout& l, const kvq::Constants& constants, uint32_t n, float* e) {
  const int64_t d = l.d, half = d / 2;
  const float* fine = constants.fine + n % kvq::FINE * d;
  const float* coarse = constants.coarse + n / kvq::FINE % kvq::COARSE * d;
  for (int64_t i = 0; i < half; i += LANES) {
    const Floats c = load(fine + i), s = load(fine + half + i), x = load(coarse + i), y = load(coarse + half + i);
    store(e + i, c * x - s * y);
    store(e + half + i, s * x + c * y);
  }
}

}  // namespace float32
}  // namespace

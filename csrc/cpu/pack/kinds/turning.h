//     e(n) = cos(a theta_i), sin(a theta_i)        a = 32 n + 31/2, n the slab among the request's
//
// Keys whose mean RoPE turns (formats/parts/turning.py): a slab's mean is b turned by e(n), which two tables give by the
// angle sum formulas.
#pragma once

#include "../../isa/vectors.h"
#include "../../layout.h"

namespace {
namespace float32 {

// Rows of the tables: cosines, then sines.
struct Turn {
  const float *fine, *coarse;
};

// Of the slab at any position.
inline Turn turn_at(const kvq::Layout& l, const kvq::Constants& constants, uint32_t position) {
  const uint32_t n = position / kvq::SLAB;
  return {constants.fine + n % kvq::FINE * l.d, constants.coarse + n / kvq::FINE % kvq::COARSE * l.d};
}

// Of a page's slab, wherever the page says that it is: anywhere, if it is damaged.
inline Turn turn_of(const kvq::Layout& l, const kvq::Constants& constants, const uint8_t* page, int nth) {
  uint32_t position;
  std::memcpy(&position, page + kvq::POSITION_AT, 4);
  return turn_at(l, constants, position + uint32_t(nth) * kvq::SLAB);
}

// e [d]
inline void turned(const kvq::Layout& l, Turn turn, float* e) {
  const int64_t half = l.d / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const Floats c = load(turn.fine + i), s = load(turn.fine + half + i);
    const Floats x = load(turn.coarse + i), y = load(turn.coarse + half + i);
    store(e + i, c * x - s * y);
    store(e + half + i, s * x + c * y);
  }
}

// mu [d], of a head
inline void turned_mean(const kvq::Layout& l, const kvq::Constants& constants, const float* e, float* mean) {
  const int64_t half = l.d / 2;
  const int32_t *x = constants.pairs, *y = x + half;
  const float* b = constants.mean;
  for (int64_t i = 0; i < half; ++i) {
    mean[x[i]] = b[x[i]] * e[i] - b[y[i]] * e[half + i];
    mean[y[i]] = b[y[i]] * e[i] + b[x[i]] * e[half + i];
  }
}

}  // namespace float32
}  // namespace

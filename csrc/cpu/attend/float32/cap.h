//     S = c tanh(S / c)
//
// The soft cap of attention scores (Gemma-2).
#pragma once

#include "../../isa/vectors.h"

namespace {
namespace float32 {

// A quotient of polynomials, a few units in the last place off; beyond 7.9 float32 has no number below 1.
inline Floats tanh(Floats x) {
  const Floats most = splat(7.90531110763549805f);
  x = x > most ? most : x;
  x = x < -most ? -most : x;
  const Floats s = x * x;
  Floats p = splat(-2.76076847742355e-16f);
  p = p * s + 2.00018790482477e-13f;
  p = p * s - 8.60467152213735e-11f;
  p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f;
  p = p * s + 4.89352455891786e-03f;
  Floats q = splat(1.19825839466702e-06f);
  q = q * s + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f;
  q = q * s + 4.89352518554385e-03f;
  return x * p / q;
}

// scores [rows][stride], `width` of each row
inline void cap(float* scores, int64_t stride, int rows, int width, float most) {
  const float inverse = 1 / most;
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < width; t += LANES) {
      float* at = scores + r * stride + t;
      store(at, tanh(load(at) * inverse) * most);
    }
}

}  // namespace float32
}  // namespace

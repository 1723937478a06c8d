// The rotation of formats/parts/rotation.py, times sqrt(b). The unnamed namespace: see half.h.
#pragma once

#include <cstdint>

namespace {

inline int64_t hadamard_block(int64_t d) { return d & -d; }

// x H_b of every block of b = hadamard_block(d) channels, in place: twice this is b x.
inline void hadamard(float* x, int64_t d) {
  const int64_t b = hadamard_block(d);
  for (int64_t half = 1; half < b; half *= 2)
    for (int64_t first = 0; first < d; first += 2 * half)
      for (int64_t c = first; c < first + half; ++c) {
        const float sum = x[c] + x[c + half], difference = x[c] - x[c + half];
        x[c] = sum;
        x[c + half] = difference;
      }
}

}  // namespace

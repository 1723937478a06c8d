//     O[r][c] += sum_t P[r][t] v[t][c]
//
// Values of every format, unpacked to float32 (see keys.h).
#pragma once

#include "keys.h"

namespace {
namespace float32 {

inline size_t value_bytes(const Layout& l) { return align64(4 * size_t(l.d) * SLAB); }

inline void add(Task& task, const Slab* slabs, int count) {
  const Layout& l = *task.layout;
  float* v = reinterpret_cast<float*>(task.value_work);
  for (int s = 0; s < count; ++s) {
    const Slab& slab = slabs[s];
    unpack_values(l, slab, v);
    // only the attended tokens: what the others hold must not reach the output, not even times zero
    const float* p = task.scores + s * SLAB + slab.low;
    for (int c = 0; c < l.d; c += SLAB)
      multiply<true>(p, BLOCK, task.rows, slab.high - slab.low, v + slab.low * l.d + c, l.d, task.out + c, l.d);
  }
}

}  // namespace float32
}  // namespace

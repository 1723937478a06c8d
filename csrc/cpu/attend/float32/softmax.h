//     m' = max(m, max S),  P = 2^(S - m'),  l = l 2^(m - m') + sum P,  O = O 2^(m - m')
//
// The running softmax of a block of slabs (see dispatch/attend_kernels.h).
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/vectors.h"

namespace {
namespace float32 {

using namespace kvq;

inline void hide_unattended(float* scores, const Slab* slabs, int count) {
  for (int s = 0; s < count; ++s) {
    for (int t = 0; t < slabs[s].low; ++t) scores[s * SLAB + t] = -1e30f;
    for (int t = slabs[s].high; t < SLAB; ++t) scores[s * SLAB + t] = -1e30f;
  }
}

inline void softmax(Task& task, const Slab* slabs, int count) {
  const int width = count * SLAB, d = int(task.layout->d);
  bool whole = true;
  for (int s = 0; s < count; ++s) whole = whole && slabs[s].low == 0 && slabs[s].high == SLAB;
  for (int r = 0; r < task.rows; ++r) {
    float* scores = task.scores + r * BLOCK;
    if (!whole) hide_unattended(scores, slabs, count);
    Floats best = load(scores);
    for (int t = LANES; t < width; t += LANES) best = max(best, load(scores + t));
    const float top = task.top[r], block_top = largest(best), new_top = block_top > top ? block_top : top;
    Floats total{};
    for (int t = 0; t < width; t += LANES) {
      const Floats p = exp2(load(scores + t) - new_top);
      store(scores + t, p);
      total += p;
    }
    const float shrink = exp2(splat(top - new_top))[0];
    task.total[r] = task.total[r] * shrink + sum(total);
    task.top[r] = new_top;
    if (shrink != 1.0f)
      for (int c = 0; c < d; c += LANES) store(task.out + r * d + c, load(task.out + r * d + c) * shrink);
  }
}

}  // namespace float32
}  // namespace

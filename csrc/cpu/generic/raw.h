// Attention over full-precision tokens, 32 at a time, gathered by address (see RawTask in kernel.h).
#pragma once

#include "keys.h"

namespace {
namespace generic {

// k[c][t] and v[t][c] in float32; absent tokens are 0
inline void gather(const RawTask& task, float* k, float* v) {
  const int d = task.head_size, padded = task.d;
  float row[256];
  std::memset(v, 0, 4 * size_t(padded) * SLAB);
  for (int t = 0; t < SLAB; ++t) {
    if (task.key[t]) {
      read_raw(static_cast<const uint8_t*>(task.key[t]), task.dtype, d, row);
      for (int c = 0; c < d; ++c) k[c * SLAB + t] = row[c];
      read_raw(static_cast<const uint8_t*>(task.value[t]), task.dtype, d, v + t * padded);
    } else {
      for (int c = 0; c < d; ++c) k[c * SLAB + t] = 0;
    }
  }
}

inline void add_raw(RawTask& task) {
  float* k = task.work;
  float* v = k + task.d * SLAB;
  float* scores = v + task.d * SLAB;
  gather(task, k, v);
  multiply(task.query, task.d, task.rows, task.head_size, k, SLAB, scores, SLAB);
  for (int r = 0; r < task.rows; ++r) {
    float* s = scores + r * SLAB;
    const uint8_t* seen = task.seen + (task.first_row + r) / task.group * task.seen_stride;
    float top = task.top[r];
    for (int t = 0; t < SLAB; ++t) {
      s[t] = t < task.tokens && task.key[t] && seen[t] ? s[t] : -1e30f;
      top = s[t] > top ? s[t] : top;
    }
    const float shrink = exp2(splat(task.top[r] - top))[0];
    Floats total{};
    for (int t = 0; t < SLAB; t += LANES) {
      const Floats x = load(s + t);
      const Floats p = x > -1e29f ? exp2(x - top) : Floats{};
      store(s + t, p);
      total += p;
    }
    task.top[r] = top;
    task.total[r] = task.total[r] * shrink + sum(total);
    for (int c = 0; shrink != 1.0f && c < task.d; c += LANES)
      store(task.out + r * task.d + c, load(task.out + r * task.d + c) * shrink);
  }
  for (int c = 0; c < task.d; c += SLAB)
    multiply<true>(scores, SLAB, task.rows, task.tokens, v + c, task.d, task.out + c, task.d);
}

}  // namespace generic
}  // namespace

// Joins the splits: o = sum_s 2^(l_s - l) o_s. One block per row.
#pragma once

#include "read.h"

namespace kvq {

KVQ_GLOBAL(128, 4) merge_kernel(const MergeParams p) {
  constexpr float LOG2E = 1.4426950408889634f;
  const int64_t row = block_x() + int64_t(block_y()) * 65536;
  if (row >= p.rows) return;
  float top = LOWEST;
  KVQ_ROLLED for (int i = 0; i < p.splits; ++i) top = larger(top, load(p.part_lse + i * p.rows + row));
  for (int c = thread_index(); c < p.d; c += 128) {
    float total = 0.0f, sum = 0.0f;
    KVQ_ROLLED for (int i = 0; i < p.splits; ++i) {
      const int64_t at = i * p.rows + row;
      const float weight = exp2_fast((load(p.part_lse + at) - top) * LOG2E);
      total += weight;
      sum = fused(weight, load(p.parts + at * p.d + c), sum);
    }
    store(p.out + row * p.d + c, total > 0.0f ? sum / total : 0.0f);
    if (c == 0) store(p.lse + row, total > 0.0f ? top + log2_of(total) * LN2 : bits_to_float(MINUS_INFINITY));
  }
}

}  // namespace kvq

//     s_t = unit * (q . k_t)                    products of two bf16 numbers are exact in float32
//
// Scores of full-precision tokens by AVX512_BF16, where the processor has it, query and cache are bf16 and heads are
// whole vectors.
#pragma once

#include "../float32/raw.h"

namespace {
namespace integer {

template <int R, int T>
inline void bf16_scores(const RawTask& task, int first, int t, const void* const* key, float* scores) {
  Floats acc[T][R] = {};
  for (int c = 0; c < task.head_size; c += 32) {
    __m512i k[T];
    for (int i = 0; i < T; ++i) k[i] = _mm512_loadu_si512(static_cast<const uint16_t*>(key[t + i]) + c);
    for (int r = 0; r < R; ++r) {
      const __m512i q = _mm512_loadu_si512(task.query_bits + (first + r) * task.d + c);
      for (int i = 0; i < T; ++i)
        acc[i][r] = _mm512_dpbf16_ps(acc[i][r], reinterpret_cast<__m512bh>(q), reinterpret_cast<__m512bh>(k[i]));
    }
  }
  for (int i = 0; i < T; ++i) {
    float sums[R];
    sum_each(acc[i], sums);
    for (int r = 0; r < R; ++r) scores[(first + r) * SLAB + t + i] = sums[r] * task.unit;
  }
}

template <int R>
inline void bf16_scores(const RawTask& task, int first, float* scores) {
  float32::by_twos(task, [&](auto tokens, int t, const void* const* key) {
    bf16_scores<R, decltype(tokens)::count>(task, first, t, key, scores);
  });
}

inline void add_raw(RawTask& task) {
  float32::add_raw(task, [](const RawTask& t, float* scores) {
    if (!t.query_bits) return float32::few_scores(t, scores);
    float32::by_fours(t.rows, [&](int r) { bf16_scores<4>(t, r, scores); }, [&](int r) { bf16_scores<1>(t, r, scores); });
  });
}

}  // namespace integer
}  // namespace

// The inner product of plane-quad key codes with fixed-point rows, shared by SQuat, KIVI and QJL.
//
//     acc[r][half][t] = sum_c codes[c][t] q8[r][c]          for the two halves of 16 tokens
#pragma once

#include "../kernel.h"
#include "../../isa/vnni.h"

namespace {
namespace vnni {

using namespace kvq;

// n channels (compile-time: then all offsets into q8 are), rows q8[part][R][n]
template <int N, int BITS, int PARTS, int R, int LINES>
KVQ_INLINE void dot_keys(const uint8_t* codes, const int8_t* q8, Prefetch& prefetch, __m512 (&scores)[R][2]) {
  constexpr int PLANES = 8 / BITS, STRIDE = N / PLANES, QUADS = STRIDE / 4;
  __m512i sums[CHAINS<R>][R * PARTS][2];
  auto& acc = sums[0];
  unroll<CHAINS<R>>([&](auto chain) KVQ_LAMBDA {
    unroll<R * PARTS>([&](auto x) KVQ_LAMBDA { sums[chain][x][0] = sums[chain][x][1] = _mm512_setzero_si512(); });
  });
  const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
  const char* ahead = prefetch.take<LINES * QUADS>();
  for (int quad_index = 0; quad_index < QUADS; ++quad_index) {
    const __m512i w0 = load_bytes(codes + quad_index * 128), w1 = load_bytes(codes + quad_index * 128 + 64);
    const int8_t* q = q8 + quad_index * 4;
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + 64 * (LINES * quad_index + i), 0, 3);
    unroll<PLANES>([&](auto plane) KVQ_LAMBDA {
      const __m512i c0 = _mm512_and_si512(_mm512_srli_epi32(w0, BITS * plane), mask);
      const __m512i c1 = _mm512_and_si512(_mm512_srli_epi32(w1, BITS * plane), mask);
      unroll<R * PARTS>([&](auto x) KVQ_LAMBDA {
        const __m512i b = quad(q + x * N + plane * STRIDE);
        dot(sums[plane % CHAINS<R>][x][0], c0, b);
        dot(sums[plane % CHAINS<R>][x][1], c1, b);
      });
    });
  }
  add_chains(sums);
  unroll<R>([&](auto r) KVQ_LAMBDA {
    for (int half = 0; half < 2; ++half) {
      if constexpr (PARTS == 2)
        scores[r][half] = join(acc[r][half], acc[R + r][half]);
      else
        scores[r][half] = _mm512_cvtepi32_ps(acc[r][half]);
    }
  });
}

}  // namespace vnni
}  // namespace

// AVX-512 building blocks: 16 floats or 64 bytes at a time.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "unroll.h"

namespace {
namespace vnni {

using namespace unrolled;

KVQ_INLINE __m512 load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

KVQ_INLINE __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }

// For a vector with several uses: g++ would rather load it again for each.
KVQ_INLINE __m512i load_once(const void* p) {
  __m512i v = load_bytes(p);
  asm("" : "+v"(v));
  return v;
}

// The same 4 bytes in all lanes: 4 steps of a reduction for one row.
KVQ_INLINE __m512i quad(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// acc[lane] += sum_i codes[4 lane + i] * weights[4 lane + i], unsigned codes, signed weights. Spelled out because the
// intrinsic lets g++ 12 move and spill the accumulators.
KVQ_INLINE void dot(__m512i& acc, __m512i codes, __m512i weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(weights));
}

// Sums of one row are kept in several accumulators, for a dot product must wait for the one before it in the same.
template <int R>
constexpr int CHAINS = R == 1 ? 2 : 1;

// Two accumulators, and as many more as there are chains.
template <int CHAINS, int N>
KVQ_INLINE void add_chains(__m512i (&acc)[CHAINS][N][2]) {
  unroll<CHAINS - 1>([&](auto chain) KVQ_LAMBDA {
    unroll<N>([&](auto x) KVQ_LAMBDA {
      acc[0][x][0] = _mm512_add_epi32(acc[0][x][0], acc[chain + 1][x][0]);
      acc[0][x][1] = _mm512_add_epi32(acc[0][x][1], acc[chain + 1][x][1]);
    });
  });
}

KVQ_INLINE __m512 max_abs(__m512 a, __m512 b) { return _mm512_range_ps(a, b, 0b1011); }

struct Add {
  KVQ_INLINE static __m512 of(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
};
struct Max {
  KVQ_INLINE static __m512 of(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
};

// Horizontal sums or maxima of 4 vectors at once.
template <class Op>
KVQ_INLINE __m128 reduce4(const __m512 (&x)[4]) {
  const __m512 ab = Op::of(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 cd = Op::of(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512 abcd = Op::of(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m512 halves = Op::of(abcd, _mm512_shuffle_f32x4(abcd, abcd, 0x4E));
  return _mm512_castps512_ps128(Op::of(halves, _mm512_shuffle_f32x4(halves, halves, 0xB1)));
}

// 2^x for x <= 0, relative error 3e-6 (weights have 15 bits), in some lanes, 0 in the others; 0 far below.
KVQ_INLINE __m512 exp2(__m512 x, __mmask16 lanes = 0xFFFF) {
  const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.5701017e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.59178603e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40247448e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93121815e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99999261e-1f));
  return _mm512_maskz_scalef_ps(lanes, p, n);
}

// Fixed point: a float of magnitude up to RANGE plus MAGIC has the rounded integer in its low bits.
//
//   2 parts   x + 128 = 256 hi + (lo + 128), both bytes signed: 15 bits and a sign, two dot products
//   1 part    x = hi: 7 bits and a sign
template <int PARTS>
constexpr float RANGE = PARTS == 2 ? 32600.0f : 127.0f;
template <int PARTS>
constexpr float MAGIC = PARTS == 2 ? 12582912.0f + 128.0f : 12582912.0f;

// Bytes that pack4 takes of two vectors: [a.lo b.lo a.hi b.hi] or [a b a b].
struct PackIndex {
  alignas(64) uint8_t of[64];
  constexpr explicit PackIndex(int parts) : of() {
    for (int i = 0; i < 64; ++i) {
      const int vector = i / 16 % 2, part = parts == 2 ? i / 32 : 0;
      of[i] = uint8_t(64 * vector + 4 * (i % 16) + part);
    }
  }
};
constexpr PackIndex PACK1(1), PACK2(2);

// 4 vectors with MAGIC added -> 64 high bytes, and 64 low ones for 2 parts.
template <int PARTS>
KVQ_INLINE void pack4(const __m512 (&x)[4], int8_t* hi, int8_t* lo) {
  const __m512i index = load_bytes(PARTS == 2 ? PACK2.of : PACK1.of);
  const auto bits = [](__m512 v) __attribute__((always_inline)) { return _mm512_castps_si512(v); };
  const __m512i ab = _mm512_permutex2var_epi8(bits(x[0]), index, bits(x[1]));
  const __m512i cd = _mm512_permutex2var_epi8(bits(x[2]), index, bits(x[3]));
  const __m512i first = _mm512_shuffle_i64x2(ab, cd, 0x44);
  if constexpr (PARTS == 2) {
    _mm512_storeu_si512(lo, _mm512_xor_si512(first, _mm512_set1_epi8(char(0x80))));
    _mm512_storeu_si512(hi, _mm512_shuffle_i64x2(ab, cd, 0xEE));
  } else {
    (void)lo;
    _mm512_storeu_si512(hi, first);
  }
}

// The two parts of an accumulator put together.
KVQ_INLINE __m512 join(__m512i hi, __m512i lo) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo));
}

}  // namespace vnni
}  // namespace

// 16 floats or 64 bytes at a time: AVX-512 F, BW, DQ, VL.
#pragma once

#include "lanes8.h"

namespace {
namespace integer {

struct Lanes16 {
  using Reals = __m512;
  using Ints = __m512i;
  static constexpr int LANES = 16;

  KVQ_INLINE static Reals load(const float* p) { return _mm512_loadu_ps(p); }
  KVQ_INLINE static Reals load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  KVQ_INLINE static Reals load_scales(const void* p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), kvq::SCALE_SHIFT));
  }
  KVQ_INLINE static Ints load_bytes(const void* p) { return _mm512_loadu_si512(p); }

  KVQ_INLINE static Ints load_plane(const uint8_t* p, int64_t c, int64_t stride) {
    if (stride == LANES / 2) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
    const __mmask16 next = beyond(c, stride);
    const Ints first = _mm512_maskz_loadu_epi32(__mmask16(~next), p);
    return _mm512_mask_loadu_epi32(first, next, p - 4 * stride);
  }
  KVQ_INLINE static Ints planes(int64_t c, int64_t stride, int bits) {
    const Ints first = all32(int(c / stride) * bits);
    return _mm512_mask_set1_epi32(first, beyond(c, stride), int(c / stride + 1) * bits);
  }
  KVQ_INLINE static __mmask16 beyond(int64_t c, int64_t stride) {
    const int64_t left = stride - c % stride;
    return left < LANES ? __mmask16(0xFFFFu << left) : __mmask16(0);
  }

  // A vector of codes has 32 bytes of table i, even, and 32 of the next one: [i i i+1 i+1], low ones, then high ones.
  static constexpr int TABLE_BYTES = 64;
  KVQ_INLINE static void put_table(uint8_t* tables, int i, __m128i low, __m128i high) {
    uint8_t* to = tables + i / 2 * 128 + i % 2 * 32;
    _mm256_storeu_si256((__m256i*)to, _mm256_broadcastsi128_si256(low));
    _mm256_storeu_si256((__m256i*)(to + 64), _mm256_broadcastsi128_si256(high));
  }
  KVQ_INLINE static Ints low_table(const uint8_t* tables, int i) { return load_bytes(tables + 64 * i); }
  KVQ_INLINE static Ints high_table(const uint8_t* tables, int i) { return load_bytes(tables + 64 * i + 64); }

  using Attended = __mmask16;
  KVQ_INLINE static Attended attended(int low, int high, int first) {
    return Attended(((~0u >> (32 - high)) & (~0u << low)) >> first);
  }
  KVQ_INLINE static Reals load_halves(const void* p, Attended lanes) {
    return _mm512_maskz_cvtph_ps(lanes, _mm256_loadu_si256((const __m256i*)p));
  }
  KVQ_INLINE static Reals only(Attended lanes, Reals x) { return _mm512_maskz_mov_ps(lanes, x); }

  KVQ_INLINE static Reals all(float x) { return _mm512_set1_ps(x); }
  KVQ_INLINE static Ints all8(int x) { return _mm512_set1_epi8(char(x)); }
  KVQ_INLINE static Ints all16(int x) { return _mm512_set1_epi16(short(x)); }
  KVQ_INLINE static Ints all32(int x) { return _mm512_set1_epi32(x); }
};

KVQ_INLINE void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
KVQ_INLINE void store_halves(float* p, float* q, __m512 x) {
  _mm256_storeu_ps(p, _mm512_castps512_ps256(x));
  _mm256_storeu_ps(q, _mm512_extractf32x8_ps(x, 1));
}
KVQ_INLINE void store_bytes(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
KVQ_INLINE void store_apart(void* p, int apart, __m512i v) {
  store_bytes(p, _mm512_castsi512_si256(v));
  store_bytes(static_cast<char*>(p) + apart, _mm512_extracti64x4_epi64(v, 1));
}

KVQ_INLINE __m512 fmadd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
KVQ_INLINE __m512 maximum(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
KVQ_INLINE __m512 absolute(__m512 x) { return _mm512_abs_ps(x); }
KVQ_INLINE __m512 max_abs(__m512 a, __m512 b) { return _mm512_range_ps(a, b, 0b1011); }
KVQ_INLINE __m512 rounded(__m512 x) { return _mm512_roundscale_ps(x, 0); }
KVQ_INLINE __m512 to_reals(__m512i x) { return _mm512_cvtepi32_ps(x); }
KVQ_INLINE __m512i to_ints(__m512 x) { return _mm512_cvtps_epi32(x); }

KVQ_INLINE __m512i where_negative(__m512 sign, __m512i x) {
  return _mm512_maskz_mov_epi32(_mm512_movepi32_mask(_mm512_castps_si512(sign)), x);
}
KVQ_INLINE __m512 times_if_negative(__m512 x, __m512 factor, __m512i otherwise) {
  const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
  return _mm512_mask_mul_ps(_mm512_castsi512_ps(otherwise), negative, x, factor);
}

template <int BITS>
KVQ_INLINE __m512i shift_right(__m512i x) {
  return _mm512_srli_epi32(x, BITS);
}
template <int BITS>
KVQ_INLINE __m512i shift_left(__m512i x) {
  return _mm512_slli_epi32(x, BITS);
}
KVQ_INLINE __m512i shift_right(__m512i x, __m512i bits) { return _mm512_srlv_epi32(x, bits); }

KVQ_INLINE __m512i add16(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
KVQ_INLINE __m512i add32(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
KVQ_INLINE __m512i multiply_high(__m512i a, __m512i b) { return _mm512_mulhrs_epi16(a, b); }
KVQ_INLINE __m512i multiply_pairs(__m512i a, __m512i b) { return _mm512_madd_epi16(a, b); }
KVQ_INLINE __m512i multiply_bytes(__m512i a, __m512i b) { return _mm512_maddubs_epi16(a, b); }

KVQ_INLINE __m512i shuffle(__m512i table, __m512i index) { return _mm512_shuffle_epi8(table, index); }
KVQ_INLINE __m512i interleave_low8(__m512i a, __m512i b) { return _mm512_unpacklo_epi8(a, b); }
KVQ_INLINE __m512i interleave_high8(__m512i a, __m512i b) { return _mm512_unpackhi_epi8(a, b); }
KVQ_INLINE __m512i interleave_low16(__m512i a, __m512i b) { return _mm512_unpacklo_epi16(a, b); }
KVQ_INLINE __m512i interleave_high16(__m512i a, __m512i b) { return _mm512_unpackhi_epi16(a, b); }

template <class Op>
KVQ_INLINE __m128 reduce4(const __m512 (&x)[4]) {
  const __m512 ab = Op::of(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 cd = Op::of(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512 abcd = Op::of(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m512 halves = Op::of(abcd, _mm512_shuffle_f32x4(abcd, abcd, 0x4E));
  return _mm512_castps512_ps128(Op::of(halves, _mm512_shuffle_f32x4(halves, halves, 0xB1)));
}

KVQ_INLINE void pack32(const __m512 (&x)[2], int8_t* hi, int8_t* lo) {
  const auto words = [](__m512 v) KVQ_LAMBDA { return _mm512_cvtsepi32_epi16(to_ints(v)); };
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(words(x[0])), words(x[1]), 1);
  const __m512i fixed = _mm512_adds_epi16(both, _mm512_set1_epi16(128));
  store_bytes(hi, _mm512_cvtepi16_epi8(_mm512_srai_epi16(fixed, 8)));
  store_bytes(lo, _mm512_cvtepi16_epi8(fixed) ^ _mm256_set1_epi8(char(0x80)));
}

}  // namespace integer
}  // namespace

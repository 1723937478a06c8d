// AVX2 building blocks: 8 floats or 32 bytes at a time.
//
// Integer products: vpmaddubsw multiplies unsigned codes with signed bytes and adds neighbours into 16 bits, which are
// summed there and widened by vpmaddwd before they can overflow:
//
//     |code_a w_a + code_b w_b| <= 2 * 128 * (2^bits - 1)     2 bits: 768   3 bits: 1792   4 bits: 3840
//
// so one product never saturates (32767), and SUMS<bits> of them may be added up, whatever bytes a page holds.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../tiles.h"

namespace {
namespace avx2 {

using namespace tiles;

KVQ_INLINE __m256 load_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
KVQ_INLINE __m256i load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
KVQ_INLINE void store_bytes(void* p, __m256i v) { _mm256_storeu_si256((__m256i*)p, v); }
// 16 bytes in both halves
KVQ_INLINE __m256i twice(const void* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
KVQ_INLINE __m256 absolute(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

// The same 4 bytes in all lanes: 4 steps of a reduction for one row.
KVQ_INLINE __m256i quad(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

template <int BITS>
constexpr int SUMS = 32767 / (2 * 128 * ((1 << BITS) - 1));

// The largest divisor of `count` that is at most `limit`.
constexpr int divisor(int count, int limit) {
  int best = 1;
  for (int i = 1; i <= count; ++i)
    if (i <= limit && count % i == 0) best = i;
  return best;
}

// Vectors of 8 tokens (or channels) that x rows times parts take at once: 8 accumulators leave room for the operands.
template <int X>
constexpr int VECTORS = X > 4 ? 1 : X > 2 ? 2 : 4;

// acc += codes * weights, neighbours added
KVQ_INLINE void dot(__m256i& acc, __m256i codes, __m256i weights) {
  acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, weights));
}

// 16-bit sums to 32 bits; for two parts 256 hi + lo.
KVQ_INLINE __m256i widen(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
KVQ_INLINE __m256i join(__m256i hi, __m256i lo) {
  return _mm256_add_epi32(_mm256_madd_epi16(hi, _mm256_set1_epi16(256)), widen(lo));
}

template <int R, int T>
KVQ_INLINE void clear(__m256i (&x)[R][T]) {
  unroll<R>([&](auto r) KVQ_LAMBDA { unroll<T>([&](auto t) KVQ_LAMBDA { x[r][t] = _mm256_setzero_si256(); }); });
}
template <int R, int T>
KVQ_INLINE void clear(__m256 (&x)[R][T]) {
  unroll<R>([&](auto r) KVQ_LAMBDA { unroll<T>([&](auto t) KVQ_LAMBDA { x[r][t] = _mm256_setzero_ps(); }); });
}

struct Add {
  KVQ_INLINE static __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  KVQ_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
};
struct Max {
  KVQ_INLINE static __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  KVQ_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
};

// Horizontal sums or maxima of 4 vectors at once.
template <class Op>
KVQ_INLINE __m128 reduce4(const __m256 (&x)[4]) {
  const __m256 ab = Op::of(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
  const __m256 cd = Op::of(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
  const __m256 abcd = Op::of(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  return Op::of(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}
template <class Op>
KVQ_INLINE float reduce(__m256 x) {
  const __m256 all[4] = {x, x, x, x};
  return _mm_cvtss_f32(reduce4<Op>(all));
}

// Fixed point of magnitude up to RANGE: x = 256 hi + lo, both bytes signed (15 bits and a sign), or x = hi alone.
template <int PARTS>
constexpr float RANGE = PARTS == 2 ? 32600.0f : 127.0f;

// 32 scaled floats to fixed point, saturating, so that no garbage in a page leaves the bytes' range.
KVQ_INLINE void pack32(const __m256 (&x)[4], int8_t* hi, int8_t* lo) {
  const __m256i half = _mm256_set1_epi16(128), byte = _mm256_set1_epi16(255);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
  const auto fixed = [&](__m256 a, __m256 b) __attribute__((always_inline)) {
    return _mm256_adds_epi16(_mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)), half);
  };
  const __m256i a = fixed(x[0], x[1]), b = fixed(x[2], x[3]);
  const __m256i high = _mm256_packs_epi16(_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8));
  const __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
  store_bytes(hi, _mm256_permutevar8x32_epi32(high, order));
  store_bytes(lo, _mm256_permutevar8x32_epi32(_mm256_xor_si256(low, _mm256_set1_epi8(char(0x80))), order));
}

}  // namespace avx2
}  // namespace

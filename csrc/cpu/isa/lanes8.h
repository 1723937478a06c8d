// 8 floats or 32 bytes at a time: AVX2 with FMA and F16C.
#pragma once

#include "../layout.h"
#include "intrinsics.h"

namespace {
namespace integer {

using namespace unrolled;

constexpr int SLAB_TOKENS = 32;

// -1 from the middle on, or before it: shifted, the tokens of a slab from one on, or up to one
alignas(64) constexpr struct Step {
  int32_t of[2 * SLAB_TOKENS];
  constexpr explicit Step(bool up) : of() {
    for (int i = 0; i < 2 * SLAB_TOKENS; ++i) of[i] = (i >= SLAB_TOKENS) == up ? -1 : 0;
  }
} UP(true), DOWN(false);

struct Lanes8 {
  using Reals = __m256;
  using Ints = __m256i;
  static constexpr int LANES = 8;

  KVQ_INLINE static Reals load(const float* p) { return _mm256_loadu_ps(p); }
  KVQ_INLINE static Reals load_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  // scales of one byte (formats/parts/scales.py)
  KVQ_INLINE static Reals load_scales(const void* p) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)), kvq::SCALE_SHIFT));
  }
  KVQ_INLINE static Ints load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
  KVQ_INLINE static Ints twice(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  }

  // In planes of `stride` channels: the words of channels c, c + 1, ..., of which the first is at p, and the number of
  // each one's plane times `bits`. Beyond a plane's end lie the next plane's channels, from its first word on.
  KVQ_INLINE static Ints load_plane(const uint8_t* p, int64_t c, int64_t stride) {
    const Ints next = beyond(c, stride);
    const Ints first = _mm256_maskload_epi32((const int*)p, next ^ all32(-1));
    return first | _mm256_maskload_epi32((const int*)(p - 4 * stride), next);
  }
  KVQ_INLINE static Ints planes(int64_t c, int64_t stride, int bits) {
    return _mm256_add_epi32(all32(int(c / stride) * bits), beyond(c, stride) & all32(bits));
  }
  KVQ_INLINE static Ints beyond(int64_t c, int64_t stride) {
    const Ints lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(lane, all32(int(stride - c % stride) - 1));
  }

  // Tables of 16 low and 16 high bytes for shuffle(): number i's, for the 32 bytes that a vector of codes has of it.
  static constexpr int TABLE_BYTES = 32;
  KVQ_INLINE static void put_table(uint8_t* tables, int i, __m128i low, __m128i high) {
    _mm_storeu_si128((__m128i*)(tables + 32 * i), low);
    _mm_storeu_si128((__m128i*)(tables + 32 * i + 16), high);
  }
  KVQ_INLINE static Ints low_table(const uint8_t* tables, int i) { return twice(tables + 32 * i); }
  KVQ_INLINE static Ints high_table(const uint8_t* tables, int i) { return twice(tables + 32 * i + 16); }

  // Which of a vector of tokens are attended, all of [low, high) of their slab: -1 or 0 per lane.
  using Attended = __m256i;
  KVQ_INLINE static Attended attended(int low, int high, int first) {
    return load_bytes(UP.of + SLAB_TOKENS - low + first) & load_bytes(DOWN.of + SLAB_TOKENS - high + first);
  }
  KVQ_INLINE static Reals load_halves(const void* p, Attended lanes) {
    return only(lanes, load_halves(p));
  }
  KVQ_INLINE static Reals only(Attended lanes, Reals x) { return _mm256_and_ps(x, _mm256_castsi256_ps(lanes)); }

  KVQ_INLINE static Reals all(float x) { return _mm256_set1_ps(x); }
  KVQ_INLINE static Ints all8(int x) { return _mm256_set1_epi8(char(x)); }
  KVQ_INLINE static Ints all16(int x) { return _mm256_set1_epi16(short(x)); }
  KVQ_INLINE static Ints all32(int x) { return _mm256_set1_epi32(x); }
};

KVQ_INLINE void store(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
// the first half of x to p, the second one to q
KVQ_INLINE void store_halves(float* p, float* q, __m256 x) {
  _mm_storeu_ps(p, _mm256_castps256_ps128(x));
  _mm_storeu_ps(q, _mm256_extractf128_ps(x, 1));
}
KVQ_INLINE void store_bytes(void* p, __m256i v) { _mm256_storeu_si256((__m256i*)p, v); }
// 32 bytes to p, the next 32 (if there are) `apart` bytes further
KVQ_INLINE void store_apart(void* p, int, __m256i v) { store_bytes(p, v); }

KVQ_INLINE __m256 fmadd(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
KVQ_INLINE __m256 maximum(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
KVQ_INLINE __m128 maximum(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
KVQ_INLINE __m256 absolute(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
// max(a, |b|) of a >= 0
KVQ_INLINE __m256 max_abs(__m256 a, __m256 b) { return maximum(a, absolute(b)); }
KVQ_INLINE __m256 rounded(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KVQ_INLINE __m256 to_reals(__m256i x) { return _mm256_cvtepi32_ps(x); }
KVQ_INLINE __m256i to_ints(__m256 x) { return _mm256_cvtps_epi32(x); }

// of `sign`'s lanes with the sign bit set
KVQ_INLINE __m256i where_negative(__m256 sign, __m256i x) {
  return _mm256_srai_epi32(_mm256_castps_si256(sign), 31) & x;
}
// x * factor where x is negative
KVQ_INLINE __m256 times_if_negative(__m256 x, __m256 factor, __m256i otherwise) {
  return _mm256_blendv_ps(_mm256_castsi256_ps(otherwise), x * factor, x);
}

template <int BITS>
KVQ_INLINE __m256i shift_right(__m256i x) {
  return _mm256_srli_epi32(x, BITS);
}
template <int BITS>
KVQ_INLINE __m256i shift_left(__m256i x) {
  return _mm256_slli_epi32(x, BITS);
}
KVQ_INLINE __m256i shift_right(__m256i x, __m256i bits) { return _mm256_srlv_epi32(x, bits); }

KVQ_INLINE __m256i add16(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
KVQ_INLINE __m256i add32(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
KVQ_INLINE __m256i multiply_high(__m256i a, __m256i b) { return _mm256_mulhrs_epi16(a, b); }
KVQ_INLINE __m256i multiply_pairs(__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); }
KVQ_INLINE __m256i multiply_bytes(__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }

// within each 16 bytes
KVQ_INLINE __m256i shuffle(__m256i table, __m256i index) { return _mm256_shuffle_epi8(table, index); }
KVQ_INLINE __m256i interleave_low8(__m256i a, __m256i b) { return _mm256_unpacklo_epi8(a, b); }
KVQ_INLINE __m256i interleave_high8(__m256i a, __m256i b) { return _mm256_unpackhi_epi8(a, b); }
KVQ_INLINE __m256i interleave_low16(__m256i a, __m256i b) { return _mm256_unpacklo_epi16(a, b); }
KVQ_INLINE __m256i interleave_high16(__m256i a, __m256i b) { return _mm256_unpackhi_epi16(a, b); }

// Horizontal sums or maxima of 4 vectors at once.
template <class Op>
KVQ_INLINE __m128 reduce4(const __m256 (&x)[4]) {
  const __m256 ab = Op::of(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
  const __m256 cd = Op::of(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
  const __m256 abcd = Op::of(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  return Op::of(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

KVQ_INLINE __m128i bytes_of_four() { return _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }

// 32 words of 4 bytes -> all bytes 0, all bytes 1, ...; in the lower half of a register 4 of every 8 words, 0-3 8-11
// 16-19 24-27, and in the upper one 4-7 12-15 20-23 28-31, which interleaving with other bytes puts back in line.
KVQ_INLINE void turn_bytes(const uint8_t* p, __m256i (&bytes)[4]) {
  const __m256i within = _mm256_broadcastsi128_si256(bytes_of_four());
  __m256i w[4];
  unroll<4>([&](auto i) KVQ_LAMBDA { w[i] = shuffle(Lanes8::load_bytes(p + 32 * i), within); });
  const __m256i a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpackhi_epi32(w[0], w[1]);
  const __m256i c = _mm256_unpacklo_epi32(w[2], w[3]), d = _mm256_unpackhi_epi32(w[2], w[3]);
  bytes[0] = _mm256_unpacklo_epi64(a, c);
  bytes[1] = _mm256_unpackhi_epi64(a, c);
  bytes[2] = _mm256_unpacklo_epi64(b, d);
  bytes[3] = _mm256_unpackhi_epi64(b, d);
}

// 32 scaled floats as 256 hi + lo, saturating, so garbage in a page can't leave the bytes' range.
KVQ_INLINE void pack32(const __m256 (&x)[4], int8_t* hi, int8_t* lo) {
  const __m256i half = _mm256_set1_epi16(128), byte = _mm256_set1_epi16(255);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
  const auto fixed = [&](__m256 a, __m256 b) KVQ_LAMBDA {
    return _mm256_adds_epi16(_mm256_packs_epi32(to_ints(a), to_ints(b)), half);
  };
  const __m256i a = fixed(x[0], x[1]), b = fixed(x[2], x[3]);
  const __m256i high = _mm256_packs_epi16(_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8));
  const __m256i low = _mm256_packus_epi16(a & byte, b & byte);
  store_bytes(hi, _mm256_permutevar8x32_epi32(high, order));
  store_bytes(lo, _mm256_permutevar8x32_epi32(low ^ _mm256_set1_epi8(char(0x80)), order));
}

}  // namespace integer
}  // namespace

//     sums[t] += table[code_t]         16 bits for 32 tokens, codes of 4 bits (see sign_sums.h)
//
//     turn(p, bytes)            32 words of 4 bytes -> vectors, each with the same byte of all tokens
//     add<v>(low, high, codes)  adds the entries' low and high bytes; tables of bytes 0 .. 3, 16 codes each
//     tokens<t>()               the sums of tokens WIDTH t .. WIDTH (t + 1) - 1
#pragma once

#include "../../isa/lanes.h"

namespace {
namespace integer {

// A vector of bytes is one byte of all tokens, in the order of `turn_bytes`.
struct NibbleSums8 {
  static constexpr int VECTORS_OF_BYTES = 4;
  __m256i sums[2] = {};

  KVQ_INLINE static void turn(const uint8_t* p, __m256i (&bytes)[4]) { turn_bytes(p, bytes); }

  template <int V>
  KVQ_INLINE void add(const uint8_t* low, const uint8_t* high, __m256i codes) {
    const __m256i lo = shuffle(Lanes8::twice(low + 16 * V), codes);
    const __m256i hi = shuffle(Lanes8::twice(high + 16 * V), codes);
    sum16(sums[0], interleave_low8(lo, hi));
    sum16(sums[1], interleave_high8(lo, hi));
  }

  template <int T>
  KVQ_INLINE __m256 tokens() const {
    const __m256i eight = _mm256_permute4x64_epi64(sums[T / 2], T % 2 ? 0x0D : 0x08);
    return to_reals(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(eight)));
  }
};

#if KVQ_LANES == 16
// A vector of bytes is all four bytes of 16 tokens, one after the other; so the sums of a token lie in four places.
struct NibbleSums16 {
  static constexpr int VECTORS_OF_BYTES = 2;
  __m512i sums[2][2] = {};

  KVQ_INLINE static void turn(const uint8_t* p, __m512i (&bytes)[2]) {
    const __m512i within = _mm512_broadcast_i32x4(bytes_of_four());
    const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    unroll<2>([&](auto v) KVQ_LAMBDA {
      bytes[v] = _mm512_permutexvar_epi32(across, shuffle(Lanes16::load_bytes(p + 64 * v), within));
    });
  }

  template <int V>
  KVQ_INLINE void add(const uint8_t* low, const uint8_t* high, __m512i codes) {
    const __m512i lo = shuffle(Lanes16::load_bytes(low), codes), hi = shuffle(Lanes16::load_bytes(high), codes);
    sum16(sums[V][0], interleave_low8(lo, hi));
    sum16(sums[V][1], interleave_high8(lo, hi));
  }

  template <int T>
  KVQ_INLINE __m512 tokens() const {
    const auto four_places = [](__m512i x) KVQ_LAMBDA {
      const __m256i two = add16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
      return _mm_add_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    };
    return to_reals(_mm512_cvtepi16_epi32(_mm256_set_m128i(four_places(sums[T][1]), four_places(sums[T][0]))));
  }
};
using NibbleSums = NibbleSums16;
#else
using NibbleSums = NibbleSums8;
#endif

}  // namespace integer
}  // namespace

// Products of bytes with VNNI, and packing with VBMI: vpdpbusd adds four products to 32 bits, which hold any sum.
#pragma once

#include "lanes.h"

namespace {
namespace integer {

template <int BITS>
constexpr int SUMS = 1 << 20;

template <int R>
constexpr int CHAINS = R == 1 ? 2 : 1;

constexpr int LINES = 3, LINES_OF_8 = 8;  // as in maddubs.h: a slab takes fewer words

// acc[lane] += sum_i codes[4 lane + i] * weights[4 lane + i], unsigned codes, signed weights. Spelled out because the
// intrinsic lets g++ 12 move and spill the accumulators.
KVQ_INLINE void dot(__m512i& acc, __m512i codes, __m512i weights) {
#ifdef KVQ_EMULATED_AVX512
  acc = _mm512_dpbusd_epi32(acc, codes, weights);
#else
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(weights));
#endif
}

KVQ_INLINE Ints join(Ints hi, Ints lo) { return add32(shift_left<8>(hi), lo); }

// a | (b & mask)
KVQ_INLINE Ints or_masked(Ints a, Ints b, Ints mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xF8); }

// A float of magnitude up to RANGE plus MAGIC has the rounded integer in its low bits, + 128: 256 hi + (lo + 128).
constexpr float MAGIC = 12582912.0f + 128.0f;
KVQ_INLINE Reals fixed(Reals x, Reals factor) { return fmadd(x, factor, L::all(MAGIC)); }
KVQ_INLINE Reals integer_of(Reals fixed) { return fixed - L::all(MAGIC); }

// Bytes that `pack` takes of two vectors: [a.lo b.lo a.hi b.hi].
struct PackIndex {
  alignas(64) uint8_t of[64];
  constexpr PackIndex() : of() {
    for (int i = 0; i < 64; ++i) of[i] = uint8_t(64 * (i / 16 % 2) + 4 * (i % 16) + i / 32);
  }
};
constexpr PackIndex PACK_INDEX;

constexpr int PACK = 64;
KVQ_INLINE void pack(const Reals (&x)[4], int8_t* hi, int8_t* lo) {
  const __m512i index = L::load_bytes(PACK_INDEX.of);
  const auto bits = [](__m512 v) KVQ_LAMBDA { return _mm512_castps_si512(v); };
  const __m512i ab = _mm512_permutex2var_epi8(bits(x[0]), index, bits(x[1]));
  const __m512i cd = _mm512_permutex2var_epi8(bits(x[2]), index, bits(x[3]));
  store_bytes(lo, _mm512_xor_si512(_mm512_shuffle_i64x2(ab, cd, 0x44), L::all8(0x80)));
  store_bytes(hi, _mm512_shuffle_i64x2(ab, cd, 0xEE));
}

}  // namespace integer
}  // namespace

// Building blocks of the integer kernels, from one source for three instruction sets: vectors of 8 lanes (AVX2) or 16
// (AVX-512), and products of bytes by vpmaddubsw (maddubs.h) or, where a translation unit defines KVQ_VNNI, by vpdpbusd
// (vnni.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes8.h"
#if KVQ_LANES == 16
#include "lanes16.h"
#endif

namespace {
namespace integer {

using namespace unrolled;
#if KVQ_LANES == 16
using L = Lanes16;
#else
using L = Lanes8;
#endif
using Reals = L::Reals;
using Ints = L::Ints;
constexpr int WIDTH = L::LANES;       // floats per vector
constexpr int PER_SLAB = 32 / WIDTH;  // vectors of a slab's 32 tokens

// The same 4 bytes in all lanes: 4 steps of a reduction for one row.
KVQ_INLINE Ints quad(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return L::all32(word);
}

// In planes of `stride` channels (by_stride): the words of channels c, c + 1, ..., of which the first is at p, and the
// number of each one's plane times `bits`. Only planes that are no whole vectors need more than a load.
KVQ_INLINE constexpr bool whole_planes(int64_t) { return true; }
template <int64_t STRIDE>
KVQ_INLINE constexpr bool whole_planes(std::integral_constant<int64_t, STRIDE>) {
  return STRIDE % WIDTH == 0;
}
template <class Stride>
KVQ_INLINE Ints load_words(const uint8_t* p, int64_t c, Stride stride) {
  if constexpr (whole_planes(Stride{}))
    return L::load_bytes(p);
  else
    return L::load_plane(p, c, stride);
}
template <class Stride>
KVQ_INLINE Ints planes(int64_t c, Stride stride, int bits) {
  if constexpr (whole_planes(Stride{}))
    return L::all32(int(c / stride) * bits);
  else
    return L::planes(c, stride, bits);
}

// The largest divisor of `count` that is at most `limit`.
constexpr int divisor(int count, int limit) {
  int best = 1;
  for (int i = 1; i <= count; ++i)
    if (i <= limit && count % i == 0) best = i;
  return best;
}

// Vectors of tokens (or channels) that x rows times parts take at once: of the 16 registers of AVX2, 8 accumulators
// leave room for the operands; with the 32 of AVX-512 a slab's two vectors always fit.
template <int X>
constexpr int VECTORS = WIDTH == 16 ? PER_SLAB : (X > 4 ? 1 : (X > 2 ? 2 : 4));

template <int R, int T, class Vector>
KVQ_INLINE void clear(Vector (&x)[R][T]) {
  unroll<R>([&](auto r) KVQ_LAMBDA { unroll<T>([&](auto t) KVQ_LAMBDA { x[r][t] = Vector{}; }); });
}

// Sums of one row are kept in several accumulators if a product must wait for the previous one in the same: the
// first of them gets the others' sums.
template <int CHAINS, int X, int T>
KVQ_INLINE void add_chains(Ints (&acc)[CHAINS][X][T]) {
  unroll<CHAINS - 1>([&](auto chain) KVQ_LAMBDA {
    unroll<X>([&](auto x) KVQ_LAMBDA {
      unroll<T>([&](auto t) KVQ_LAMBDA { acc[0][x][t] = add32(acc[0][x][t], acc[chain + 1][x][t]); });
    });
  });
}
template <int CHAINS, int X, int T>
KVQ_INLINE void clear(Ints (&acc)[CHAINS][X][T]) {
  unroll<CHAINS>([&](auto chain) KVQ_LAMBDA { clear(acc[chain]); });
}

struct Add {
  template <class Vector>
  KVQ_INLINE static Vector of(Vector a, Vector b) {
    return a + b;
  }
};
struct Max {
  template <class Vector>
  KVQ_INLINE static Vector of(Vector a, Vector b) {
    return maximum(a, b);
  }
};

template <class Op, class Vector>
KVQ_INLINE float reduce(Vector x) {
  const Vector all[4] = {x, x, x, x};
  return _mm_cvtss_f32(reduce4<Op>(all));
}

// Fixed point of magnitude up to RANGE in two parts: x = 256 hi + lo, both bytes signed (15 bits and a sign).
constexpr int PARTS = 2;
constexpr float RANGE = 32600.0f;

}  // namespace integer
}  // namespace

#ifdef KVQ_VNNI
#include "vnni.h"
#else
#include "maddubs.h"
#endif

namespace {
namespace integer {

// Where PACK of N numbers begin, for `first` = 0, PACK, 2 PACK, ...: the last ones may be packed twice.
template <int N>
KVQ_INLINE int whole_pack(int first) {
  return N % PACK && first > N - PACK ? N - PACK : first;
}

// Codes of two bits with the third ones from a plane of single bits (L::load_plane, L::planes).
KVQ_INLINE Ints with_third_bit(Ints low, Ints plane, Ints number) {
  return or_masked(low, shift_left<2>(shift_right(plane, number)), L::all8(4));
}

}  // namespace integer
}  // namespace

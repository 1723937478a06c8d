// Building blocks of the kernels for processors without VNNI: AVX2 (8 lanes) and AVX-512 BW (16), from one source.
//
// Integer products: vpmaddubsw multiplies unsigned codes with signed bytes and adds neighbours into 16 bits, which are
// summed there and widened by vpmaddwd before they can overflow:
//
//     |code_a w_a + code_b w_b| <= 2 * 128 * (2^bits - 1)     2 bits: 768   3 bits: 1792   4 bits: 3840
//
// so one product never saturates (32767), and SUMS<bits> of them may be added up, whatever bytes a page holds.
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
constexpr int PER_SLAB = 32 / WIDTH;  // vectors of a slab's 32 tokens, and of what pack32 packs

// The same 4 bytes in all lanes: 4 steps of a reduction for one row.
KVQ_INLINE Ints quad(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return L::all32(word);
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

// Vectors of tokens (or channels) that x rows times parts take at once: of the 16 registers of AVX2, 8 accumulators
// leave room for the operands; with the 32 of AVX-512 a slab's two vectors always fit.
template <int X>
constexpr int VECTORS = WIDTH == 16 ? PER_SLAB : X > 4 ? 1 : X > 2 ? 2 : 4;

// Sums that are added up in the order of the program: g++ chooses another, for which it keeps all that is to be added
// on the stack.
template <class Vector>
KVQ_INLINE void sum16(Vector& acc, Vector x) {
  acc = add16(acc, x);
  asm("" : "+v"(acc));
}
template <class Vector>
KVQ_INLINE void sum32(Vector& acc, Vector x) {
  acc = add32(acc, x);
  asm("" : "+v"(acc));
}

// acc += codes * weights, neighbours added
KVQ_INLINE void dot(Ints& acc, Ints codes, Ints weights) { sum16(acc, multiply_bytes(codes, weights)); }

// 16-bit sums to 32 bits; for two parts 256 hi + lo.
KVQ_INLINE Ints widen(Ints sums) { return multiply_pairs(sums, L::all16(1)); }
KVQ_INLINE Ints join(Ints hi, Ints lo) { return add32(multiply_pairs(hi, L::all16(256)), widen(lo)); }

template <int R, int T, class Vector>
KVQ_INLINE void clear(Vector (&x)[R][T]) {
  unroll<R>([&](auto r) KVQ_LAMBDA { unroll<T>([&](auto t) KVQ_LAMBDA { x[r][t] = Vector{}; }); });
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

// Fixed point of magnitude up to RANGE: x = 256 hi + lo, both bytes signed (15 bits and a sign).
constexpr float RANGE = 32600.0f;

}  // namespace integer
}  // namespace

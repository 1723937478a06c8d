// Products of bytes without VNNI: vpmaddubsw multiplies unsigned codes with signed bytes and adds neighbours into 16
// bits, which are summed there and widened by vpmaddwd before they can overflow:
//
//     |code_a w_a + code_b w_b| <= 2 * 128 * (2^bits - 1)     2 bits: 768   3 bits: 1792   4 bits: 3840
//
// so one product never saturates (32767), and SUMS<bits> of them may be added up, whatever bytes a page holds.
#pragma once

#include "lanes.h"

namespace {
namespace integer {

template <int BITS>
constexpr int SUMS = 32767 / (2 * 128 * ((1 << BITS) - 1));

template <int R>
constexpr int CHAINS = 1;

// Cache lines that are prefetched for every word of key codes, and for every 8 words that are multiplied at once.
constexpr int LINES = 1, LINES_OF_8 = 2;

// Sums that are added up in the program's order: g++ would choose another, for which it keeps all the terms
// on the stack.
template <class Vector>
KVQ_INLINE void sum16(Vector& acc, Vector x) {
  acc = add16(acc, x);
  in_register(acc);
}
template <class Vector>
KVQ_INLINE void sum32(Vector& acc, Vector x) {
  acc = add32(acc, x);
  in_register(acc);
}

// acc += codes * weights, neighbours added
KVQ_INLINE void dot(Ints& acc, Ints codes, Ints weights) { sum16(acc, multiply_bytes(codes, weights)); }

// The sums in 32 bits, of both parts: 256 hi + lo.
KVQ_INLINE Ints join(Ints hi, Ints lo) {
  return add32(multiply_pairs(hi, L::all16(256)), multiply_pairs(lo, L::all16(1)));
}

// a | (b & mask)
KVQ_INLINE Ints or_masked(Ints a, Ints b, Ints mask) { return a | (b & mask); }

// x in units of 1 / factor, to be packed; and the integer that it is rounded to.
KVQ_INLINE Reals fixed(Reals x, Reals factor) { return x * factor; }
KVQ_INLINE Reals integer_of(Reals fixed) { return rounded(fixed); }

constexpr int PACK = 32;  // numbers that are packed together
KVQ_INLINE void pack(const Reals (&x)[PACK / WIDTH], int8_t* hi, int8_t* lo) { pack32(x, hi, lo); }

}  // namespace integer
}  // namespace

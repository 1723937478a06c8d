//     sum_c codes[c][t] q8[r][c]         for the 32 tokens t of a slab
//
// The inner product of key codes, stored in planes (formats/parts/planes.py), with rows in fixed point.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

// Words of codes with q8[part][row][ROW], whose planes lie PLANE apart, constants so that all offsets are. Calls
// finish(row, token, sums of WIDTH tokens from that token on) for every row. `chunk`: words between two widenings.
template <int ROW, int PLANE, int BITS, int R, class Finish>
KVQ_INLINE void dot_words(const uint8_t* codes, int words, int chunk, const int8_t* q8, Prefetch& prefetch,
                          Finish finish) {
  constexpr int PLANES = 8 / BITS, X = 2 * R, T = VECTORS<X>;
  const Ints mask = L::all8((1 << BITS) - 1);
  for (int token = 0; token < SLAB; token += WIDTH * T) {
    Ints sums[R][T];
    clear(sums);
    for (int first = 0; first < words; first += chunk) {
      const int last = first + chunk < words ? first + chunk : words;
      Ints acc[CHAINS<R>][X][T];
      clear(acc);
      const char* ahead = prefetch.take(LINES * (last - first));
      for (int word = first; word < last; ++word) {
        Ints w[T];
        unroll<T>([&](auto t) KVQ_LAMBDA { w[t] = L::load_bytes(codes + word * 128 + token * 4 + 4 * WIDTH * t); });
        const int8_t* q = q8 + word * 4;
        for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + 64 * (LINES * (word - first) + i), 0, 3);
        unroll<PLANES>([&](auto plane) KVQ_LAMBDA {
          Ints c[T];
          unroll<T>([&](auto t) KVQ_LAMBDA { c[t] = shift_right<BITS * plane>(w[t]) & mask; });
          unroll<X>([&](auto x) KVQ_LAMBDA {
            const Ints b = quad(q + x * ROW + plane * PLANE);
            unroll<T>([&](auto t) KVQ_LAMBDA { dot(acc[plane % CHAINS<R>][x][t], c[t], b); });
          });
        });
      }
      add_chains(acc);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        unroll<T>([&](auto t) KVQ_LAMBDA {
          sums[r][t] = add32(sums[r][t], join(acc[0][r][t], acc[0][R + r][t]));
        });
      });
    }
    unroll<R>([&](auto r) KVQ_LAMBDA {
      unroll<T>([&](auto t) KVQ_LAMBDA { finish(r, token + WIDTH * t, to_reals(sums[r][t])); });
    });
  }
}

// The same of N channels in planes that follow each other.
template <int N, int BITS, int R, class Finish>
KVQ_INLINE void dot_keys(const uint8_t* codes, const int8_t* q8, Prefetch& prefetch, Finish finish) {
  constexpr int PLANES = 8 / BITS, WORDS = N / PLANES / 4, CHUNK = divisor(WORDS, SUMS<BITS> / PLANES);
  static_assert(CHUNK * PLANES <= SUMS<BITS>);
  dot_words<N, N / PLANES, BITS, R>(codes, WORDS, CHUNK, q8, prefetch, finish);
}

}  // namespace integer
}  // namespace

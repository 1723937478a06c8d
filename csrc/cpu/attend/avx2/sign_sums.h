//     <f, +-1 bits>         by tables of the 16 sums +-f_1 +-f_2 +-f_3 +-f_4
//
// Bit p of byte b is row b + p STRIDE of the sketch, so a nibble of byte b stands for four features, and its part of
// the sum is one of 16. Two byte shuffles (low and high bytes) look up 16 bits for every code of a vector, two
// interleavings combine the bytes, and two additions add them up: six instructions, compared with 16 for byte products
// of features in two parts.
//
// Sums stay in 16 bits, so a row's unit is chosen such that the magnitudes of its rounded features add up to at most
// 32767: they can't overflow, whatever bits a page holds. With 256 rows the rounding is about 1e-3 of
// a typical sum, with more rows it is more, so there is a limit, MOST_SIGNS.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "nibble_sums.h"

namespace {
namespace integer {

using namespace kvq;

// The signs of a nibble's bits: of[bit][code].
struct NibbleSigns {
  alignas(32) int16_t of[4][16];
  constexpr NibbleSigns() : of() {
    for (int code = 0; code < 16; ++code)
      for (int bit = 0; bit < 4; ++bit) of[bit][code] = code >> bit & 1 ? 1 : -1;
  }
};
constexpr NibbleSigns NIBBLE_SIGNS;

// The tables of one row for four bytes of bits: [nibble][low, high bytes][byte % 4][code].
using NibbleTables = uint8_t[2][2][4][16];

// sums[r][t] = <f, +-1> of R rows and WIDTH tokens from WIDTH t on, `quads` times 32 features. One function for all
// sizes of sketches: with one for each size, g++ spent a third of its time for AVX2 on this loop.
template <int R>
static __attribute__((noinline)) void add_signs(const uint8_t* bits, const NibbleTables* tables, int quads,
                                                Prefetch& prefetch, Reals (&sums)[R][PER_SLAB]) {
  NibbleSums acc[R];
  for (int quad = 0; quad < quads; ++quad) {
    Ints bytes[NibbleSums::VECTORS_OF_BYTES];
    NibbleSums::turn(bits + quad * 128, bytes);
    prefetch.lines<2>();
    unroll<2>([&](auto nibble) KVQ_LAMBDA {
      unroll<NibbleSums::VECTORS_OF_BYTES>([&](auto v) KVQ_LAMBDA {
        const Ints codes = shift_right<4 * nibble>(bytes[v]) & L::all8(15);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const auto& parts = tables[r * quads + quad][nibble];
          acc[r].template add<v>(parts[0][0], parts[1][0], codes);
        });
      });
    });
  }
  unroll<R>([&](auto r) KVQ_LAMBDA {
    unroll<PER_SLAB>([&](auto t) KVQ_LAMBDA { sums[r][t] = acc[r].template tokens<t>(); });
  });
}

class SignSums {
  int signs_;             // rows of the sketch
  NibbleTables* tables_;  // [rows][signs / 32]

 public:
  float step[ROWS];

  // What a sketch of `signs` rows takes of the work area, a multiple of 64, and this object's pointer into it.
  static size_t bytes(int64_t signs) { return size_t(signs) / 32 * ROWS * sizeof(NibbleTables); }
  char* place(int64_t signs, char* at) {
    signs_ = int(signs);
    tables_ = reinterpret_cast<NibbleTables*>(at);
    return at + bytes(signs);
  }

  // Tables of row `row` from its features.
  __attribute__((noinline)) void fill(int row, const float* f) {
    const int stride = signs_ / 8;
    Reals magnitudes[4] = {};
    for (int j = 0; j < signs_; j += WIDTH) magnitudes[0] = magnitudes[0] + absolute(L::load(f + j));
    const float total = _mm_cvtss_f32(reduce4<Add>(magnitudes)) + 1e-30f, most = float(32767 - signs_);  // rounding adds 1/2 each
    step[row] = total / most;
    alignas(64) int32_t fixed[MOST_SIGNS];
    for (int j = 0; j < signs_; j += WIDTH) store_bytes(fixed + j, to_ints(L::load(f + j) * L::all(most / total)));
    const __m256i byte = _mm256_set1_epi16(255);
    for (int b = 0; b < stride; ++b)
      for (int nibble = 0; nibble < 2; ++nibble) {
        __m256i sums = _mm256_setzero_si256();
        unroll<4>([&](auto bit) KVQ_LAMBDA {
          const __m256i feature = _mm256_set1_epi16(short(fixed[b + (4 * nibble + bit) * stride]));
          sums = add16(sums, _mm256_sign_epi16(feature, Lanes8::load_bytes(NIBBLE_SIGNS.of[bit])));
        });
        const __m256i bytes = _mm256_packus_epi16(sums & byte, _mm256_srli_epi16(sums, 8));
        const __m256i parts = _mm256_permute4x64_epi64(bytes, 0xD8);
        auto& to = tables_[row * (signs_ / 32) + b / 4][nibble];
        _mm_store_si128((__m128i*)to[0][b % 4], _mm256_castsi256_si128(parts));
        _mm_store_si128((__m128i*)to[1][b % 4], _mm256_extracti128_si256(parts, 1));
      }
  }

  template <int R>
  KVQ_INLINE void add(const uint8_t* bits, int row, Prefetch& prefetch, Reals (&sums)[R][PER_SLAB]) const {
    add_signs<R>(bits, tables_ + row * (signs_ / 32), signs_ / 32, prefetch, sums);
  }
};

}  // namespace integer
}  // namespace

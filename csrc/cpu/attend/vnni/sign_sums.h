//     <f, +-1 bits>         by tables of the 16 sums +-f_1 +-f_2 +-f_3 +-f_4
//
// Bit p of byte b is row b + p STRIDE of the sketch, with STRIDE an eighth of its rows. So the low nibble of byte b stands
// for the rows b, b + STRIDE, b + 2 STRIDE, b + 3 STRIDE, and their part of the sum is one of 16. A byte shuffle looks up 64
// of them, and a dot product with their units adds those of a token: 128 products cost one instruction, and only the
// finished sums are rounded to 8 bits.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

// For a vector with several uses: g++ would rather load it again for each.
KVQ_INLINE __m512i load_once(const void* p) {
  __m512i v = L::load_bytes(p);
  in_register(v);
  return v;
}

// The signs of 4-bit codes, as pairs of 16-bit numbers for bits 0 1 and bits 2 3.
struct NibbleSigns {
  alignas(64) int16_t of[2][32];
  constexpr NibbleSigns() : of() {
    for (int code = 0; code < 16; ++code)
      for (int bit = 0; bit < 4; ++bit) of[bit / 2][2 * code + bit % 2] = code >> bit & 1 ? 1 : -1;
  }
};
constexpr NibbleSigns NIBBLE_SIGNS;

// Bytes number 1 of 2 x 16 numbers.
struct SecondBytes {
  alignas(64) uint8_t of[64];
  constexpr SecondBytes() : of() {
    for (int i = 0; i < 64; ++i) of[i] = uint8_t(64 * (i / 16 % 2) + 4 * (i % 16) + 1);
  }
};
constexpr SecondBytes SECOND_BYTES;

// For every 32 rows of the sketch and 4 of the query.
struct SignTables {
  alignas(64) int8_t sums[2][4][64];  // [nibble][row][16 byte % 4 + code]
  uint8_t units[2][4][4];             // of the sums, in steps: [nibble][row][byte % 4]
};

class SignSums {
  int stride_, quads_;  // of the sketch's rows: 8 and 32 parts
  SignTables* tables_;  // [rows / 4][quads]

 public:
  float step[ROWS];

  // What a sketch of `signs` rows takes of the work area, a multiple of 64, and this object's pointer into it.
  static size_t bytes(int64_t signs) { return size_t(signs) / 32 * (ROWS / 4) * sizeof(SignTables); }
  char* place(int64_t signs, char* at) {
    stride_ = int(signs) / 8;
    quads_ = int(signs) / 32;
    tables_ = reinterpret_cast<SignTables*>(at);
    return at + bytes(signs);
  }

  // Tables of row `row` from its features.
  __attribute__((noinline)) void fill(int row, const float* f) {
    const int width = stride_ < 16 ? stride_ : 16;
    const __mmask16 lanes = __mmask16((1u << width) - 1);
    const auto load = [&](const float* p) { return _mm512_maskz_loadu_ps(lanes, p); };
    // where `width` bytes begin, for `first` = 0, width, 2 width, ...: the last ones may be taken twice
    const auto whole = [&](int first) { return first > stride_ - width ? stride_ - width : first; };
    alignas(64) float total[2][MOST_SIGNS / 8];  // of magnitudes: the largest sum
    __m512 largest = _mm512_setzero_ps();
    for (int nibble = 0; nibble < 2; ++nibble)
      for (int first = 0; first < stride_; first += width) {
        const int b = whole(first);
        __m512 t = _mm512_setzero_ps();
        for (int p = 4 * nibble; p < 4 * nibble + 4; ++p) t = _mm512_add_ps(t, _mm512_abs_ps(load(f + p * stride_ + b)));
        largest = _mm512_max_ps(largest, t);
        _mm512_mask_storeu_ps(total[nibble] + b, lanes, t);
      }
    const float top = _mm512_reduce_max_ps(largest) + 1e-30f;
    constexpr float LARGEST = 32510.0f;  // of a sum in 16 bits, of which the high byte is kept
    step[row] = top / 255.0f * (256.0f / LARGEST);
    alignas(64) int32_t pairs[4][MOST_SIGNS / 8];  // two rows' features side by side
    for (int first = 0; first < stride_; first += width)
      for (int nibble = 0; nibble < 2; ++nibble) {
        const int b = whole(first);
        const __m512 steps = _mm512_mul_ps(load(total[nibble] + b), _mm512_set1_ps(255.0f / top));
        const __m512 up = _mm512_max_ps(_mm512_roundscale_ps(steps, _MM_FROUND_TO_POS_INF), _mm512_set1_ps(1.0f));
        const __m512 units = _mm512_min_ps(up, _mm512_set1_ps(255.0f));
        alignas(16) uint8_t bytes[16];
        _mm512_mask_cvtepi32_storeu_epi8(bytes, lanes, _mm512_cvtps_epi32(units));
        for (int i = 0; i < width; i += 4) std::memcpy(of(row)[(b + i) / 4].units[nibble][row % 4], bytes + i, 4);
        const __m512 factor = _mm512_div_ps(_mm512_set1_ps(LARGEST * 255.0f / top), units);
        for (int i = 2 * nibble; i < 2 * nibble + 2; ++i) {
          const auto fixed = [&](int p) { return _mm512_cvtps_epi32(_mm512_mul_ps(load(f + p * stride_ + b), factor)); };
          const __m512i high = _mm512_slli_epi32(fixed(2 * i + 1), 16);
          _mm512_mask_storeu_epi32(pairs[i] + b, lanes, _mm512_mask_blend_epi16(0xAAAAAAAAu, fixed(2 * i), high));
        }
      }
    const __m512i signs0 = L::load_bytes(NIBBLE_SIGNS.of[0]), signs1 = L::load_bytes(NIBBLE_SIGNS.of[1]);
    const __m512i second = L::load_bytes(SECOND_BYTES.of), half = _mm512_set1_epi32(128);
    for (int quad = 0; quad < quads_; ++quad)
      for (int nibble = 0; nibble < 2; ++nibble) {
        __m512i sums[4];
        unroll<4>([&](auto j) KVQ_LAMBDA {
          const int b = 4 * quad + j;
          const __m512i first = _mm512_dpwssd_epi32(half, signs0, _mm512_set1_epi32(pairs[2 * nibble][b]));
          sums[j] = _mm512_dpwssd_epi32(first, signs1, _mm512_set1_epi32(pairs[2 * nibble + 1][b]));
        });
        const __m512i ab = _mm512_permutex2var_epi8(sums[0], second, sums[1]);
        const __m512i cd = _mm512_permutex2var_epi8(sums[2], second, sums[3]);
        _mm512_store_si512(of(row)[quad].sums[nibble][row % 4], _mm512_shuffle_i64x2(ab, cd, 0x44));
      }
  }

  // sums[r][half] of rows row .. row + R - 1, 2 x 16 tokens
  template <int R>
  KVQ_INLINE void add(const uint8_t* bits, int row, Prefetch& prefetch, __m512 (&sums)[R][2]) const {
    __m512i acc[2][R][2];  // [nibble]: a dot product must wait for the one before it in the same accumulator
    unroll<2 * R>([&](auto x) KVQ_LAMBDA { acc[x / R][x % R][0] = acc[x / R][x % R][1] = _mm512_setzero_si512(); });
    const SignTables* tables = of(row);
    for (int quad = 0; quad < quads_; ++quad, ++tables) {
      const __m512i w0 = L::load_bytes(bits + quad * 128), w1 = L::load_bytes(bits + quad * 128 + 64);
      prefetch.lines<2>();
      unroll<2>([&](auto nibble) KVQ_LAMBDA {
        const __m512i i0 = index(nibble ? _mm512_srli_epi32(w0, 4) : w0);
        const __m512i i1 = index(nibble ? _mm512_srli_epi32(w1, 4) : w1);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m512i t = load_once(tables->sums[nibble][r]);
          const __m512i unit = integer::quad(tables->units[nibble][r]);
          dot(acc[nibble][r][0], unit, _mm512_permutexvar_epi8(i0, t));
          dot(acc[nibble][r][1], unit, _mm512_permutexvar_epi8(i1, t));
        });
      });
    }
    add_chains(acc);
    unroll<R>([&](auto r) KVQ_LAMBDA {
      sums[r][0] = _mm512_cvtepi32_ps(acc[0][r][0]);
      sums[r][1] = _mm512_cvtepi32_ps(acc[0][r][1]);
    });
  }

 private:
  SignTables* of(int row) const { return tables_ + row / 4 * quads_; }

  KVQ_INLINE static __m512i index(__m512i nibbles) {  // (nibble & 15) | 16 (byte % 4)
    return _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi8(15), _mm512_set1_epi32(0x30201000), 0xEA);
  }
};

}  // namespace integer
}  // namespace

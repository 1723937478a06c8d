//     q . k_t = c/m |k_in| <f, bits> + c'/m' |k_out| <f', bits'>,   f = S q - S_out q_out,  f' = S' q_out
//
// QJL's keys (formats/methods/qjl.py): sign bits of a sketch, with features of the query in 8 bits.
//
// Four signs are one nibble, and their part of <f, bits> is one of 16 sums +-f_1 +-f_2 +-f_3 +-f_4. A byte shuffle
// looks up 64 of them, and a dot product with their units adds those of a token. So 128 products cost one instruction,
// and only the finished sums are rounded to 8 bits.
//
// f depends on a slab's outlier channels. Its tables are recomputed when these differ from the previous slab's.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

// For a vector with several uses: g++ would rather load it again for each.
KVQ_INLINE __m512i load_once(const void* p) {
  __m512i v = L::load_bytes(p);
  asm("" : "+v"(v));
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

// <f, +-1> over N sign bits of a token. Bit p of byte b is row b + p STRIDE of the sketch, so the low nibble of byte b
// stands for the rows b, b + STRIDE, b + 2 STRIDE, b + 3 STRIDE. Each of these sums has its own unit, `scale` steps.
template <int N>
struct SignSums {
  static constexpr int STRIDE = N / 8, QUADS = N / 32, LINES = 2;
  static constexpr int WIDTH = STRIDE < 16 ? STRIDE : 16;
  static constexpr __mmask16 LANES16 = __mmask16((1u << WIDTH) - 1);
  // Where WIDTH bytes begin, for `first` = 0, WIDTH, 2 WIDTH, ...: the last ones may be taken twice.
  KVQ_INLINE static int whole(int first) { return first > STRIDE - WIDTH ? STRIDE - WIDTH : first; }

  alignas(64) int8_t table[ROWS / 4][QUADS][2][4][64];  // [quad][nibble][row][16 byte % 4 + code]
  alignas(64) uint8_t scale[ROWS / 4][QUADS][2][4][4];  // [quad][nibble][row][byte % 4]
  float step[ROWS];

  // Tables of row `row` from its N features.
  void fill(int row, const float* f) {
    const auto load = [&](const float* p) { return _mm512_maskz_loadu_ps(LANES16, p); };
    alignas(64) float total[2][STRIDE];  // of magnitudes: the largest sum
    __m512 largest = _mm512_setzero_ps();
    for (int nibble = 0; nibble < 2; ++nibble)
      for (int first = 0; first < STRIDE; first += WIDTH) {
        const int b = whole(first);
        __m512 t = _mm512_setzero_ps();
        for (int p = 4 * nibble; p < 4 * nibble + 4; ++p) t = _mm512_add_ps(t, _mm512_abs_ps(load(f + p * STRIDE + b)));
        largest = _mm512_max_ps(largest, t);
        _mm512_mask_storeu_ps(total[nibble] + b, LANES16, t);
      }
    const float top = _mm512_reduce_max_ps(largest) + 1e-30f;
    constexpr float LARGEST = 32510.0f;  // of a sum in 16 bits, of which the high byte is kept
    step[row] = top / 255.0f * (256.0f / LARGEST);
    alignas(64) int32_t pairs[4][STRIDE];  // two rows' features side by side
    for (int first = 0; first < STRIDE; first += WIDTH)
      for (int nibble = 0; nibble < 2; ++nibble) {
        const int b = whole(first);
        const __m512 steps = _mm512_mul_ps(load(total[nibble] + b), _mm512_set1_ps(255.0f / top));
        const __m512 up = _mm512_max_ps(_mm512_roundscale_ps(steps, _MM_FROUND_TO_POS_INF), _mm512_set1_ps(1.0f));
        const __m512 units = _mm512_min_ps(up, _mm512_set1_ps(255.0f));
        alignas(16) uint8_t bytes[16];
        _mm512_mask_cvtepi32_storeu_epi8(bytes, LANES16, _mm512_cvtps_epi32(units));
        for (int i = 0; i < WIDTH; i += 4) std::memcpy(scale[row / 4][(b + i) / 4][nibble][row % 4], bytes + i, 4);
        const __m512 factor = _mm512_div_ps(_mm512_set1_ps(LARGEST * 255.0f / top), units);
        for (int i = 2 * nibble; i < 2 * nibble + 2; ++i) {
          const auto fixed = [&](int p) { return _mm512_cvtps_epi32(_mm512_mul_ps(load(f + p * STRIDE + b), factor)); };
          const __m512i high = _mm512_slli_epi32(fixed(2 * i + 1), 16);
          _mm512_mask_storeu_epi32(pairs[i] + b, LANES16, _mm512_mask_blend_epi16(0xAAAAAAAAu, fixed(2 * i), high));
        }
      }
    const __m512i signs0 = L::load_bytes(NIBBLE_SIGNS.of[0]), signs1 = L::load_bytes(NIBBLE_SIGNS.of[1]);
    const __m512i second = L::load_bytes(SECOND_BYTES.of), half = _mm512_set1_epi32(128);
    for (int quad = 0; quad < QUADS; ++quad)
      for (int nibble = 0; nibble < 2; ++nibble) {
        __m512i sums[4];
        unroll<4>([&](auto j) KVQ_LAMBDA {
          const int b = 4 * quad + j;
          const __m512i first = _mm512_dpwssd_epi32(half, signs0, _mm512_set1_epi32(pairs[2 * nibble][b]));
          sums[j] = _mm512_dpwssd_epi32(first, signs1, _mm512_set1_epi32(pairs[2 * nibble + 1][b]));
        });
        const __m512i ab = _mm512_permutex2var_epi8(sums[0], second, sums[1]);
        const __m512i cd = _mm512_permutex2var_epi8(sums[2], second, sums[3]);
        _mm512_store_si512(table[row / 4][quad][nibble][row % 4], _mm512_shuffle_i64x2(ab, cd, 0x44));
      }
  }

  // sums[r][half] of rows row .. row + R - 1, 2 x 16 tokens
  template <int R>
  KVQ_INLINE void add(const uint8_t* bits, int row, Prefetch& prefetch, __m512 (&sums)[R][2]) const {
    __m512i acc[2][R][2];  // [nibble]: a dot product must wait for the one before it in the same accumulator
    unroll<2 * R>([&](auto x) KVQ_LAMBDA { acc[x / R][x % R][0] = acc[x / R][x % R][1] = _mm512_setzero_si512(); });
    for (int quad = 0; quad < QUADS; ++quad) {
      const __m512i w0 = L::load_bytes(bits + quad * 128), w1 = L::load_bytes(bits + quad * 128 + 64);
      prefetch.lines<LINES>();
      unroll<2>([&](auto nibble) KVQ_LAMBDA {
        const __m512i i0 = index(nibble ? _mm512_srli_epi32(w0, 4) : w0);
        const __m512i i1 = index(nibble ? _mm512_srli_epi32(w1, 4) : w1);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m512i t = load_once(table[row / 4][quad][nibble][r]);
          const __m512i units = integer::quad(scale[row / 4][quad][nibble][r]);
          dot(acc[nibble][r][0], units, _mm512_permutexvar_epi8(i0, t));
          dot(acc[nibble][r][1], units, _mm512_permutexvar_epi8(i1, t));
        });
      });
    }
    add_chains(acc);
    unroll<R>([&](auto r) KVQ_LAMBDA {
      sums[r][0] = _mm512_cvtepi32_ps(acc[0][r][0]);
      sums[r][1] = _mm512_cvtepi32_ps(acc[0][r][1]);
    });
  }

  KVQ_INLINE static __m512i index(__m512i nibbles) {  // (nibble & 15) | 16 (byte % 4)
    return _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi8(15), _mm512_set1_epi32(0x30201000), 0xEA);
  }
};

template <int D>
struct SketchKeys {
  static constexpr int M = 2 * D, OUTER = D;

  struct Work {
    SignSums<M> inner;
    SignSums<OUTER> outer;
    uint8_t index[32];
    bool prepared;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static void begin(Task& task) { reinterpret_cast<Work*>(task.key_work)->prepared = false; }

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    const uint8_t* index = slab.data + l.ko_index;
    if (!work.prepared || std::memcmp(work.index, index, l.outliers)) {
      row_tiles(task.rows, [&](auto r, int row) { prepare<decltype(r)::value>(task, index, row, work); });
      std::memcpy(work.index, index, l.outliers);
      work.prepared = true;
    }
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  // Tables of f and f' of R rows for a slab's outlier channels.
  template <int R>
  static __attribute__((noinline)) void prepare(const Task& task, const uint8_t* index, int row, Work& work) {
    const Constants& constants = *task.constants;
    const int outliers = int(task.layout->outliers);
    alignas(64) float inner[R][M], outer[R][OUTER];
    float query[32][R];  // of the outliers
    const float* column[32];
    for (int i = 0; i < outliers; ++i) {
      const int c = index[i] % D;
      column[i] = constants.sketch + c * M;
      for (int r = 0; r < R; ++r) query[i][r] = task.query[(row + r) * D + c];
    }
    for (int j = 0; j < M; j += 16) {
      __m512 f[R];
      unroll<R>([&](auto r) KVQ_LAMBDA { f[r] = _mm512_loadu_ps(task.features + (row + r) * M + j); });
      for (int i = 0; i < outliers; ++i) {
        const __m512 s = _mm512_loadu_ps(column[i] + j);
        unroll<R>([&](auto r) KVQ_LAMBDA { f[r] = _mm512_fnmadd_ps(_mm512_set1_ps(query[i][r]), s, f[r]); });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA { _mm512_store_ps(inner[r] + j, f[r]); });
    }
    for (int j = 0; j < OUTER; j += 16) {
      __m512 f[R];
      unroll<R>([&](auto r) KVQ_LAMBDA { f[r] = _mm512_setzero_ps(); });
      for (int i = 0; i < outliers; ++i) {
        const __m512 s = _mm512_loadu_ps(constants.outer + i * OUTER + j);
        unroll<R>([&](auto r) KVQ_LAMBDA { f[r] = _mm512_fmadd_ps(_mm512_set1_ps(query[i][r]), s, f[r]); });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA { _mm512_store_ps(outer[r] + j, f[r]); });
    }
    for (int r = 0; r < R; ++r) {
      work.inner.fill(row + r, inner[r]);
      if (outliers) work.outer.fill(row + r, outer[r]);
    }
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    const Layout& l = *task.layout;
    const Constants& constants = *task.constants;
    __m512 inner[R][2], outer[R][2];
    work.inner.template add<R>(slab.data + l.k_bits, row, task.prefetch, inner);
    if (!l.outliers) {
      for (int half = 0; half < 2; ++half)
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m512 x = _mm512_set1_ps(work.inner.step[row + r] * constants.sketch_scale);
          const __m512 scale = _mm512_mul_ps(x, L::load_halves(slab.data + l.k_norm + 32 * half));
          _mm512_storeu_ps(task.scores + (row + r) * BLOCK + column + 16 * half, _mm512_mul_ps(inner[r][half], scale));
        });
      return;
    }
    work.outer.template add<R>(slab.data + l.ko_bits, row, task.prefetch, outer);
    for (int half = 0; half < 2; ++half) {
      const __m512 inner_norm = L::load_halves(slab.data + l.k_norm + 32 * half);
      const __m512 outer_norm = L::load_halves(slab.data + l.ko_norm + 32 * half);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512 x = _mm512_set1_ps(work.inner.step[row + r] * constants.sketch_scale);
        const __m512 y = _mm512_set1_ps(work.outer.step[row + r] * constants.outer_scale);
        const __m512 a = _mm512_mul_ps(inner[r][half], _mm512_mul_ps(x, inner_norm));
        const __m512 b = _mm512_mul_ps(y, outer_norm);
        _mm512_storeu_ps(task.scores + (row + r) * BLOCK + column + 16 * half,
                         _mm512_fmadd_ps(outer[r][half], b, a));
      });
    }
  }
};

}  // namespace integer
}  // namespace

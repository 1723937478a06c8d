// QJL keys: sign bits of a sketch, with 8-bit features of the query (see formats/qjl.py).
//
//     q . k_t = c/m |k_in| <f, bits> + c'/m' |k_out| <f', bits'>,   f = S q - S_out q_out,  f' = S' q_out
//     <f, +-1 bits> = 2 <f, bits> - sum f
//
// Each slab names its own outlier channels, so f is made per slab, but kept while the channels stay the same: those
// of real keys seldom change.
#pragma once

#include "dot_keys.h"

namespace {
namespace avx512 {

// unpacklo and unpackhi leave 32 rows in this order: the bytes of two such vectors, put back in line.
struct UnpackedIndex {
  alignas(64) uint8_t of[64];
  constexpr UnpackedIndex() : of() {
    for (int i = 0; i < 64; ++i) {
      const int row = i % 32;
      of[i] = uint8_t(64 * (row / 4 % 2) + 4 * (row / 8 * 4 + row % 4));
    }
  }
};
constexpr UnpackedIndex UNPACKED;

// f is made of 16-bit integers: S in units of 1 / 128, the query's channels in units of its largest. Its worst case,
// |S_j| |q| <= sqrt(d) sqrt(d) in those units, stays below 2^31.
template <int D>
struct SketchKeys {
  static constexpr int M = 2 * D, OUTER = D, LINES = 2;
  static constexpr float SKETCH_UNIT = 128.0f;  // as `sketch16` in kernels/cpu.py

  struct Work {
    alignas(64) int8_t inner[ROWS / 4][4][M], outer[ROWS / 4][4][OUTER];
    alignas(64) int32_t whole[ROWS][M];  // S q, in the order of UNPACKED
    alignas(64) int32_t made[4][M];      // features of a tile, likewise
    alignas(64) int32_t largest[4][16];  // of their magnitudes
    alignas(64) int16_t negative[ROWS / 4][D][4];  // -q of a tile's rows in its units
    float unit[ROWS];                    // of q: its largest channel / 32767
    alignas(16) float inner_step[ROWS], inner_sum[ROWS], outer_step[ROWS], outer_sum[ROWS];
    alignas(16) int32_t pairs[16][4];    // two channels of `negative` side by side
    uint8_t index[32];
    bool prepared;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    work.prepared = false;
    const __m512i low_half = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    for (int row = 0; row < task.rows; ++row) {
      __m512 largest = _mm512_setzero_ps();
      for (int c = 0; c < D; c += 16) largest = max_abs(largest, _mm512_loadu_ps(task.query + row * D + c));
      work.unit[row] = (_mm512_reduce_max_ps(largest) + 1e-30f) / 32767.0f;
      for (int c = 0; c < D; ++c)
        work.negative[row / 4][c][row % 4] = int16_t(-__builtin_lrintf(task.query[row * D + c] / work.unit[row]));
      const __m512 factor = _mm512_set1_ps(SKETCH_UNIT / work.unit[row]);
      for (int j = 0; j < M; j += 32) {
        const float* f = task.features + row * M + j;
        const auto fixed = [&](int at) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(f + at), factor)); };
        const __m512i a = fixed(0), b = fixed(16), high_half = _mm512_add_epi32(low_half, _mm512_set1_epi32(4));
        _mm512_store_si512(work.whole[row] + j, _mm512_permutex2var_epi32(a, low_half, b));
        _mm512_store_si512(work.whole[row] + j + 16, _mm512_permutex2var_epi32(a, high_half, b));
      }
    }
  }

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const Layout& l = *task.layout;
    const uint8_t* index = slab.data + l.key_at[4];
    if (!work.prepared || std::memcmp(work.index, index, l.outliers)) {
      row_tiles(task.rows, [&](auto r, int row) { prepare<decltype(r)::value>(task, index, row, work); });
      std::memcpy(work.index, index, l.outliers);
      work.prepared = true;
    }
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  // f and f' of R rows for a slab's outlier channels, as 8-bit integers
  template <int R>
  static __attribute__((noinline)) void prepare(const Task& task, const uint8_t* index, int row, Work& work) {
    const int outliers = int(task.layout->outliers), pairs = (outliers + 1) / 2;
    const int16_t* column[32];
    const int16_t* outer[32];
    for (int i = 0; i < pairs; ++i) {
      const int a = index[2 * i] % D, b = 2 * i + 1 < outliers ? index[2 * i + 1] % D : a;
      column[2 * i] = task.constants->sketch16 + a * M;
      column[2 * i + 1] = task.constants->sketch16 + b * M;
      outer[2 * i] = task.constants->sketch16 + D * M + 2 * i * OUTER;
      outer[2 * i + 1] = b == a ? outer[2 * i] : outer[2 * i] + OUTER;
      const auto rows = [&](int c) { return _mm_loadl_epi64((const __m128i*)work.negative[row / 4][c]); };
      const __m128i second = 2 * i + 1 < outliers ? rows(b) : _mm_setzero_si128();
      _mm_store_si128((__m128i*)work.pairs[i], _mm_unpacklo_epi16(rows(a), second));
    }
    const __m128 unit = _mm_mul_ps(_mm_loadu_ps(work.unit + row), _mm_set1_ps(1 / SKETCH_UNIT));
    subtract<M, R>(column, pairs, [&](int r, int j) { return load_bytes(work.whole[row + r] + j); }, work);
    round<M, R>(work, work.inner[row / 4], unit, work.inner_step + row, work.inner_sum + row);
    subtract<OUTER, R>(outer, pairs, [](int, int) { return _mm512_setzero_si512(); }, work);
    // in negative units, for the pairs are negative
    round<OUTER, R>(work, work.outer[row / 4], _mm_sub_ps(_mm_setzero_ps(), unit), work.outer_step + row, work.outer_sum + row);
  }

  // made = start - sum_i column_i q_i
  template <int N, int R, class Start>
  KVQ_INLINE static void subtract(const int16_t* const* column, int pairs, Start start, Work& work) {
    __m512i largest[R];
    unroll<R>([&](auto r) KVQ_LAMBDA { largest[r] = _mm512_setzero_si512(); });
    for (int j = 0; j < N; j += 32) {
      __m512i acc[R][2];
      unroll<R>([&](auto r) KVQ_LAMBDA { acc[r][0] = start(r, j), acc[r][1] = start(r, j + 16); });
      for (int i = 0; i < pairs; ++i) {
        const __m512i a = load_bytes(column[2 * i] + j), b = load_bytes(column[2 * i + 1] + j);
        const __m512i lo = _mm512_unpacklo_epi16(a, b), hi = _mm512_unpackhi_epi16(a, b);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m512i q = _mm512_set1_epi32(work.pairs[i][r]);
          acc[r][0] = _mm512_dpwssd_epi32(acc[r][0], lo, q);
          acc[r][1] = _mm512_dpwssd_epi32(acc[r][1], hi, q);
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        _mm512_store_si512(work.made[r] + j, acc[r][0]);
        _mm512_store_si512(work.made[r] + j + 16, acc[r][1]);
        const __m512i both = _mm512_max_epi32(_mm512_abs_epi32(acc[r][0]), _mm512_abs_epi32(acc[r][1]));
        largest[r] = _mm512_max_epi32(largest[r], both);
      });
    }
    unroll<R>([&](auto r) KVQ_LAMBDA { _mm512_store_si512(work.largest[r], largest[r]); });
  }

  // R rows of `made` to 8 bits; the unit of a row's integers, and their sum
  template <int N, int R>
  KVQ_INLINE static void round(Work& work, int8_t (&to)[4][N], __m128 unit, float* step, float* sum) {
    __m512 tops[4], sums[4];
    unroll<4>([&](auto r) KVQ_LAMBDA {
      tops[r] = sums[r] = _mm512_setzero_ps();
      if constexpr (r < R) tops[r] = _mm512_cvtepi32_ps(load_bytes(work.largest[r]));
    });
    const __m128 top = _mm_max_ps(reduce4<Max>(tops), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE<1>), top));
    const __m512 magic = _mm512_set1_ps(MAGIC<1>);
    const __m512i line = load_bytes(UNPACKED.of);
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const int32_t* f = work.made[r];
      __m512i total = _mm512_setzero_si512();
      for (int j = 0; j < N; j += 64) {
        __m512i x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m512 value = _mm512_cvtepi32_ps(load_bytes(f + j + 16 * v));
          x[v] = _mm512_castps_si512(_mm512_fmadd_ps(value, _mm512_set1_ps(factors[r]), magic));
        });
        const __m512i ab = _mm512_permutex2var_epi8(x[0], line, x[1]), cd = _mm512_permutex2var_epi8(x[2], line, x[3]);
        const __m512i bytes = _mm512_shuffle_i64x2(ab, cd, 0x44);
        _mm512_storeu_si512(to[r] + j, bytes);
        dot(total, _mm512_set1_epi8(1), bytes);
      }
      sums[r] = _mm512_cvtepi32_ps(total);
    });
    _mm_storeu_ps(step, _mm_mul_ps(_mm_mul_ps(top, _mm_set1_ps(1 / RANGE<1>)), unit));
    _mm_storeu_ps(sum, reduce4<Add>(sums));
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    const Layout& l = *task.layout;
    __m512 inner[R][2], outer[R][2];
    dot_keys<M, 1, 1, R, LINES>(slab.data + l.key_at[0], work.inner[row / 4][0], task.prefetch, inner);
    dot_keys<OUTER, 1, 1, R, LINES>(slab.data + l.key_at[2], work.outer[row / 4][0], task.prefetch, outer);
    const __m512 two = _mm512_set1_ps(2.0f);
    for (int half = 0; half < 2; ++half) {
      const __m512 inner_norm = load_halves(slab.data + l.key_at[1] + 32 * half);
      const __m512 outer_norm = load_halves(slab.data + l.key_at[3] + 32 * half);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512 a = _mm512_fmsub_ps(inner[r][half], two, _mm512_set1_ps(work.inner_sum[row + r]));
        const __m512 b = _mm512_fmsub_ps(outer[r][half], two, _mm512_set1_ps(work.outer_sum[row + r]));
        const __m512 x = _mm512_set1_ps(work.inner_step[row + r] * task.constants->sketch_scale);
        const __m512 y = _mm512_set1_ps(work.outer_step[row + r] * task.constants->outer_scale);
        const __m512 s = _mm512_fmadd_ps(_mm512_mul_ps(a, x), inner_norm, _mm512_mul_ps(_mm512_mul_ps(b, y), outer_norm));
        _mm512_storeu_ps(task.scores + (row + r) * BLOCK + column + 16 * half, s);
      });
    }
  }
};

}  // namespace avx512
}  // namespace

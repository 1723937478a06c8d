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
  static constexpr int M = 2 * D, OUTER = D, LINES = 5;
  static constexpr float SKETCH_UNIT = 128.0f;  // as `sketch16` in kernels/cpu.py

  struct Work {
    alignas(64) int8_t inner[ROWS / 4][4][M], outer[ROWS / 4][4][OUTER];
    alignas(64) int32_t whole[ROWS][M];  // S q, in the order of UNPACKED
    alignas(64) int32_t made[4][M];      // features of a tile, likewise
    float unit[ROWS], inverse[ROWS];     // of q: its largest channel / 32767
    float inner_step[ROWS], inner_sum[ROWS], outer_step[ROWS], outer_sum[ROWS];
    alignas(64) int32_t pairs[4][16];    // -q_out of a tile's rows, two 16-bit numbers each
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
      work.inverse[row] = 1 / work.unit[row];
      const __m512 factor = _mm512_set1_ps(SKETCH_UNIT * work.inverse[row]);
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
    alignas(64) int32_t channel[32] = {};
    for (int i = 0; i < 2 * pairs; ++i) {
      const int c = channel[i] = index[i < outliers ? i : 0] % D;
      column[i] = task.constants->sketch16 + c * M;
      outer[i] = task.constants->sketch16 + D * M + (i < outliers ? i : 0) * OUTER;
    }
    const __mmask32 real = ~0u >> (32 - outliers);
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m512 factor = _mm512_set1_ps(-work.inverse[row + r]);
      const auto gather = [&](int at) __attribute__((always_inline)) {
        const __m512i c = load_bytes(channel + at);
        return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(
            _mm512_mul_ps(_mm512_i32gather_ps(c, task.query + (row + r) * D, 4), factor)));
      };
      _mm256_store_si256((__m256i*)work.pairs[r], _mm256_maskz_mov_epi16(__mmask16(real), gather(0)));
      if (outliers > 16)
        _mm256_store_si256((__m256i*)(work.pairs[r] + 8), _mm256_maskz_mov_epi16(__mmask16(real >> 16), gather(16)));
    });
    const auto inner_start = [&](int r, int j) { return load_bytes(work.whole[row + r] + j); };
    subtract<M, R>(column, pairs, inner_start, work);
    unroll<R>([&](auto r) KVQ_LAMBDA {
      round<M>(work.made[r], work.inner[row / 4][r], work.inner_step[row + r], work.inner_sum[row + r]);
      work.inner_step[row + r] *= work.unit[row + r] / SKETCH_UNIT;
    });
    subtract<OUTER, R>(outer, pairs, [](int, int) { return _mm512_setzero_si512(); }, work);
    unroll<R>([&](auto r) KVQ_LAMBDA {  // minus, for the pairs are negative
      round<OUTER>(work.made[r], work.outer[row / 4][r], work.outer_step[row + r], work.outer_sum[row + r]);
      work.outer_step[row + r] *= -work.unit[row + r] / SKETCH_UNIT;
    });
  }

  // made = start - sum_i column_i q_i
  template <int N, int R, class Start>
  KVQ_INLINE static void subtract(const int16_t* const* column, int pairs, Start start, Work& work) {
    for (int j = 0; j < N; j += 32) {
      __m512i acc[R][2];
      unroll<R>([&](auto r) KVQ_LAMBDA { acc[r][0] = start(r, j), acc[r][1] = start(r, j + 16); });
      for (int i = 0; i < pairs; ++i) {
        const __m512i a = load_bytes(column[2 * i] + j), b = load_bytes(column[2 * i + 1] + j);
        const __m512i lo = _mm512_unpacklo_epi16(a, b), hi = _mm512_unpackhi_epi16(a, b);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m512i q = _mm512_set1_epi32(work.pairs[r][i]);
          acc[r][0] = _mm512_dpwssd_epi32(acc[r][0], lo, q);
          acc[r][1] = _mm512_dpwssd_epi32(acc[r][1], hi, q);
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        _mm512_store_si512(work.made[r] + j, acc[r][0]);
        _mm512_store_si512(work.made[r] + j + 16, acc[r][1]);
      });
    }
  }

  template <int N>
  KVQ_INLINE static void round(const int32_t* f, int8_t* to, float& step, float& sum) {
    __m512i largest = _mm512_setzero_si512();
    for (int j = 0; j < N; j += 16) largest = _mm512_max_epi32(largest, _mm512_abs_epi32(load_bytes(f + j)));
    const float top = float(_mm512_reduce_max_epi32(largest)) + 1e-30f;
    const __m512 factor = _mm512_set1_ps(RANGE<1> / top), magic = _mm512_set1_ps(MAGIC<1>);
    const __m512i line = load_bytes(UNPACKED.of);
    __m512i total = _mm512_setzero_si512();
    for (int j = 0; j < N; j += 64) {
      __m512i x[4];
      unroll<4>([&](auto v) KVQ_LAMBDA {
        const __m512 value = _mm512_cvtepi32_ps(load_bytes(f + j + 16 * v));
        x[v] = _mm512_castps_si512(_mm512_fmadd_ps(value, factor, magic));
      });
      const __m512i ab = _mm512_permutex2var_epi8(x[0], line, x[1]), cd = _mm512_permutex2var_epi8(x[2], line, x[3]);
      const __m512i bytes = _mm512_shuffle_i64x2(ab, cd, 0x44);
      _mm512_storeu_si512(to + j, bytes);
      dot(total, _mm512_set1_epi8(1), bytes);
    }
    step = top / RANGE<1>;
    sum = float(_mm512_reduce_add_epi32(total));
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

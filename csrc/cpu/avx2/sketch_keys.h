// QJL keys: sign bits of a sketch, with 15-bit features of the query (see formats/qjl.py). With 8 bits and one unit per
// row, the error of the output came to 1.04e-2, above the 1e-2 that are allowed.
//
//     q . k_t = c/m |k_in| <f, bits> + c'/m' |k_out| <f', bits'>,   f = S q - S_out q_out,  f' = S' q_out
//     <f, +-1 bits> = 2 <f, bits> - sum f
//
// Every slab names its outlier channels. f is made anew where they change, which is seldom: those of a request are
// chosen once.
#pragma once

#include "dot_keys.h"

namespace {
namespace avx2 {

template <int D>
struct SketchKeys {
  static constexpr int M = 2 * D, OUTER = D, MOST = 32;

  struct Work {
    alignas(32) int8_t inner[ROWS / 4][8][M], outer[ROWS / 4][8][OUTER];  // of a tile: [part][R][features]
    alignas(32) float made[4][M];  // features of a tile
    float inner_step[ROWS], inner_sum[ROWS], outer_step[ROWS], outer_sum[ROWS];
    uint8_t index[MOST];
    bool prepared;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) { reinterpret_cast<Work*>(task.key_work)->prepared = false; }

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

  // f and f' of R rows for a slab's outlier channels, in fixed point
  template <int R>
  static __attribute__((noinline)) void prepare(const Task& task, const uint8_t* index, int row, Work& work) {
    const Constants& constants = *task.constants;
    const int outliers = int(task.layout->outliers);
    const float *column[MOST], *outer[MOST];
    float q[4][MOST];
    for (int i = 0; i < outliers; ++i) {
      const int c = index[i] % D;  // a damaged page must not lead out of the sketch
      column[i] = constants.sketch + c * M;
      outer[i] = constants.outer + i * OUTER;
      for (int r = 0; r < R; ++r) q[r][i] = task.query[(row + r) * D + c];
    }
    make<M, R>(column, q, outliers, [&](int r, int j, __m256 sum) KVQ_LAMBDA {
      return _mm256_sub_ps(_mm256_loadu_ps(task.features + (row + r) * M + j), sum);
    }, work);
    round<M, R>(work, work.inner[row / 4], work.inner_step + row, work.inner_sum + row);
    make<OUTER, R>(outer, q, outliers, [](int, int, __m256 sum) KVQ_LAMBDA { return sum; }, work);
    round<OUTER, R>(work, work.outer[row / 4], work.outer_step + row, work.outer_sum + row);
  }

  // made = finish(r, j, sum_i q_i column_i)
  template <int N, int R, class Finish>
  KVQ_INLINE static void make(const float* const* column, const float (*q)[MOST], int count, Finish finish,
                              Work& work) {
    for (int j = 0; j < N; j += 16) {
      __m256 acc[R][2];
      unroll<R>([&](auto r) KVQ_LAMBDA { acc[r][0] = acc[r][1] = _mm256_setzero_ps(); });
      for (int i = 0; i < count; ++i) {
        const __m256 a = _mm256_loadu_ps(column[i] + j), b = _mm256_loadu_ps(column[i] + j + 8);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m256 x = _mm256_set1_ps(q[r][i]);
          acc[r][0] = _mm256_fmadd_ps(a, x, acc[r][0]);
          acc[r][1] = _mm256_fmadd_ps(b, x, acc[r][1]);
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        _mm256_storeu_ps(work.made[r] + j, finish(r, j, acc[r][0]));
        _mm256_storeu_ps(work.made[r] + j + 8, finish(r, j + 8, acc[r][1]));
      });
    }
  }

  // R rows of `made` to fixed point; the unit of a row's integers, and their sum
  template <int N, int R>
  KVQ_INLINE static void round(const Work& work, int8_t (*to)[N], float* step, float* sum) {
    for (int r = 0; r < R; ++r) {
      __m256 largest = _mm256_setzero_ps(), total = _mm256_setzero_ps();
      for (int j = 0; j < N; j += 8) largest = _mm256_max_ps(largest, absolute(_mm256_loadu_ps(work.made[r] + j)));
      const float top = reduce<Max>(largest) + 1e-30f;
      const __m256 factor = _mm256_set1_ps(RANGE<2> / top);
      for (int j = 0; j < N; j += 32) {
        __m256 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          x[v] = _mm256_mul_ps(_mm256_loadu_ps(work.made[r] + j + 8 * v), factor);
          total = _mm256_add_ps(total, _mm256_round_ps(x[v], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        });
        pack32(x, to[r] + j, to[R + r] + j);
      }
      step[r] = top / RANGE<2>;
      sum[r] = reduce<Add>(total);
    }
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    const Layout& l = *task.layout;
    float* scores = task.scores + row * BLOCK + column;
    const __m256 two = _mm256_set1_ps(2.0f);
    const auto inner = [&](auto r, int token, __m256 s) KVQ_LAMBDA {
      const __m256 step = _mm256_set1_ps(work.inner_step[row + r] * task.constants->sketch_scale);
      const __m256 x = _mm256_mul_ps(_mm256_fmsub_ps(s, two, _mm256_set1_ps(work.inner_sum[row + r])), step);
      _mm256_storeu_ps(scores + r * BLOCK + token, _mm256_mul_ps(x, load_halves(slab.data + l.key_at[1] + 2 * token)));
    };
    dot_keys<M, 1, 2, R>(slab.data + l.key_at[0], work.inner[row / 4][0], task.prefetch, inner);
    const auto outer = [&](auto r, int token, __m256 s) KVQ_LAMBDA {
      const __m256 step = _mm256_set1_ps(work.outer_step[row + r] * task.constants->outer_scale);
      const __m256 x = _mm256_mul_ps(_mm256_fmsub_ps(s, two, _mm256_set1_ps(work.outer_sum[row + r])), step);
      float* to = scores + r * BLOCK + token;
      _mm256_storeu_ps(to, _mm256_fmadd_ps(x, load_halves(slab.data + l.key_at[3] + 2 * token), _mm256_loadu_ps(to)));
    };
    dot_keys<OUTER, 1, 2, R>(slab.data + l.key_at[2], work.outer[row / 4][0], task.prefetch, outer);
  }
};

}  // namespace avx2
}  // namespace

// Per-token values: one scale and zero per token and group of channels.
//
//     sum_t p_t v_tc = sum_t (p_t scale_tg) code_tc + sum_t p_t zero_tg          g = the group of channel c
//
// The scales go into the softmax weights once per block, which then become fixed point per row and group. Channels
// are taken up to 32 at a time, which share their weights because groups are multiples of 32.
#pragma once

#include "../kernel.h"
#include "lanes.h"

namespace {
namespace avx2 {

using namespace kvq;

template <int BITS>
struct TokenValues {
  static constexpr int PARTS = 2, GROUPS = 8;
  static constexpr int RUN = SUMS<BITS> / (SLAB / 4) < BLOCK_SLABS ? SUMS<BITS> / (SLAB / 4) : BLOCK_SLABS;
  static_assert(RUN >= 1);  // slabs between two widenings

  struct Work {
    alignas(32) float widest[BLOCK];     // the largest scale of a token
    alignas(32) float scaled[4][BLOCK];  // p in fixed-point units, of a tile's rows
    alignas(32) int8_t weights[PARTS][4][GROUPS][BLOCK];
    alignas(16) float offset[GROUPS][4];
    float step[4];
    alignas(32) int32_t attended[BLOCK];  // -1 where attended, else 0
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static int groups_of(const Layout& l) { return int((l.d + l.group - 1) / l.group); }

  static void add(Task& task, const Slab* slabs, int count) {
    Work& work = *reinterpret_cast<Work*>(task.value_work);
    const Layout& l = *task.layout;
    for (int s = 0; s < count; ++s)
      for (int t = 0; t < SLAB; ++t) work.attended[s * SLAB + t] = t >= slabs[s].low && t < slabs[s].high ? -1 : 0;
    find_widest(l, slabs, count, work);
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      scale_weights<R>(task, row, count, work);
      for (int g = 0; g < groups_of(l); ++g) weigh<R>(l, slabs, count, g, work);
      for (int c = 0; c < l.d; c += 8 * VECTORS<R * PARTS>)
        multiply<R>(l, slabs, count, c, work, task.prefetch, task.out + row * l.d + c);
    });
  }

  // 8 tokens' parameters of a group; 0 where unattended: their weight is 0, but 0 times NaN would not be
  KVQ_INLINE static __m256 parameters(const Slab* slabs, int64_t at, int group, int t, const Work& work) {
    const __m256 stored = load_halves(slabs[t / SLAB].data + at + (group * SLAB + t % SLAB) * 2);
    return _mm256_and_ps(stored, _mm256_castsi256_ps(load_bytes(work.attended + t)));
  }

  static void find_widest(const Layout& l, const Slab* slabs, int count, Work& work) {
    for (int t = 0; t < count * SLAB; t += 8) {
      __m256 widest = parameters(slabs, l.value_at[1], 0, t, work);
      for (int g = 1; g < groups_of(l); ++g)
        widest = _mm256_max_ps(widest, parameters(slabs, l.value_at[1], g, t, work));
      _mm256_storeu_ps(work.widest + t, widest);
    }
  }

  // The fixed-point unit of a row follows its largest p * scale, not the largest scale: an outlier token that nobody
  // looks at must not cost the others their precision.
  template <int R>
  KVQ_INLINE static void scale_weights(const Task& task, int row, int count, Work& work) {
    const float* p = task.scores + row * BLOCK;
    __m256 largest[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = _mm256_setzero_ps(); });
    for (int t = 0; t < count * SLAB; t += 8) {
      const __m256 widest = _mm256_loadu_ps(work.widest + t);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        largest[r] = _mm256_max_ps(largest[r], _mm256_mul_ps(_mm256_loadu_ps(p + r * BLOCK + t), widest));
      });
    }
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE<PARTS>), top));
    _mm_storeu_ps(work.step, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE<PARTS>)));
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m256 factor = _mm256_set1_ps(factors[r]);
      for (int t = 0; t < count * SLAB; t += 8)
        _mm256_storeu_ps(work.scaled[r] + t, _mm256_mul_ps(_mm256_loadu_ps(p + r * BLOCK + t), factor));
    });
  }

  template <int R>
  KVQ_INLINE static void weigh(const Layout& l, const Slab* slabs, int count, int g, Work& work) {
    __m256 zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { zeros[r] = _mm256_setzero_ps(); });
    for (int t = 0; t < count * SLAB; t += SLAB) {
      __m256 scale[4], zero[4];
      unroll<4>([&](auto v) KVQ_LAMBDA {
        scale[v] = parameters(slabs, l.value_at[1], g, t + 8 * v, work);
        zero[v] = parameters(slabs, l.value_at[2], g, t + 8 * v, work);
      });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        __m256 x[4];
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m256 p = _mm256_loadu_ps(work.scaled[r] + t + 8 * v);
          zeros[r] = _mm256_fmadd_ps(p, zero[v], zeros[r]);
          x[v] = _mm256_mul_ps(p, scale[v]);
        });
        pack32(x, work.weights[0][r][g] + t, work.weights[1][r][g] + t);
      });
    }
    _mm_store_ps(work.offset[g], _mm_mul_ps(reduce4<Add>(zeros), _mm_loadu_ps(work.step)));
  }

  // 8 T channels from c on, R rows
  template <int R>
  static __attribute__((noinline)) void multiply(const Layout& l, const Slab* slabs, int count, int c, Work& work,
                                                 Prefetch& prefetch, float* out) {
    constexpr int X = R * PARTS, T = VECTORS<X>;
    const int64_t stride = l.d * BITS / 8;  // channels of a plane
    const int group = int(c / l.group);
    const __m256i mask = _mm256_set1_epi8((1 << BITS) - 1);
    int64_t at[T];
    __m256i shift[T], sums[R][T];
    unroll<T>([&](auto t) KVQ_LAMBDA {
      at[t] = l.value_at[0] + (c + 8 * t) % stride * 4;
      shift[t] = _mm256_set1_epi32(int((c + 8 * t) / stride) * BITS);
      unroll<R>([&](auto r) KVQ_LAMBDA { sums[r][t] = _mm256_setzero_si256(); });
    });
    for (int first = 0; first < count; first += RUN) {
      __m256i acc[X][T];
      clear(acc);
      for (int s = first; s < first + RUN && s < count; ++s) {
        const int8_t* weights = work.weights[0][0][group] + s * SLAB;
        unroll<SLAB / 4>([&](auto e) KVQ_LAMBDA {
          __m256i code[T];
          unroll<T>([&](auto t) KVQ_LAMBDA {
            const __m256i bytes = load_bytes(slabs[s].data + at[t] + e * stride * 4);
            code[t] = _mm256_and_si256(_mm256_srlv_epi32(bytes, shift[t]), mask);
          });
          if (e % 4 == 0) prefetch.lines<1>();
          unroll<X>([&](auto x) KVQ_LAMBDA {
            constexpr int part = x / R, r = x % R;
            const __m256i b = quad(weights + (part * 4 + r) * GROUPS * BLOCK + e * 4);
            unroll<T>([&](auto t) KVQ_LAMBDA { dot(acc[x][t], code[t], b); });
          });
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        unroll<T>([&](auto t) KVQ_LAMBDA {
          sums[r][t] = _mm256_add_epi32(sums[r][t], join(acc[r][t], acc[R + r][t]));
        });
      });
    }
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const __m256 step = _mm256_set1_ps(work.step[r]), offset = _mm256_set1_ps(work.offset[group][r]);
      unroll<T>([&](auto t) KVQ_LAMBDA {
        float* to = out + r * l.d + 8 * t;
        const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(to), offset);
        _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][t]), step, sum));
      });
    });
  }
};

}  // namespace avx2
}  // namespace

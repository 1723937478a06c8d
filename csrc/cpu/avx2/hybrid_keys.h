// InnerQ keys, 2 bits: per token and group of 32 channels a scale and either a zero or 32 sign bits.
//
//     q . k_t = sum_g ( |scale_gt| sum_c q'_c u_ct + zero_gt sum_c q'_c ),    q' = q * norm
//     symmetric:  u = code + 4 sign,  zero = -4 |scale|        asymmetric:  u = code
//
// so the sign is one more bit of an unsigned code. q' becomes fixed point once per norm, which changes at most from
// page to page; scales multiply 8 tokens' partial scores at once.
#pragma once

#include "../kernel.h"
#include "lanes.h"

namespace {
namespace avx2 {

using namespace kvq;

// The parameters of 8 groups: what a slot holds depends on the sign of the scale.
struct HybridParameters {
  __m256 scale, zero;
  __m256i signs;

  KVQ_INLINE void read(const uint8_t* scales, const uint8_t* slots) {
    const __m256 stored = load_halves(scales);
    const __m256i slot = load_bytes(slots), symmetric = _mm256_srai_epi32(_mm256_castps_si256(stored), 31);
    scale = absolute(stored);
    const __m256 four = _mm256_mul_ps(stored, _mm256_set1_ps(4.0f));
    zero = _mm256_blendv_ps(_mm256_castsi256_ps(slot), four, stored);
    signs = _mm256_and_si256(symmetric, slot);
  }
};

// The codes of one quad: two bits from the bytes, the third from the sign words. (word >> quad) & 0x01010101 are the
// quad's signs, so shifted to bit 2 that is a shift by quad - 2.
template <int QUAD>
KVQ_INLINE __m256i hybrid_codes(__m256i shifted_bytes, __m256i signs) {
  const __m256i aligned = QUAD < 2 ? _mm256_slli_epi32(signs, QUAD < 2 ? 2 - QUAD : 0)
                                   : _mm256_srli_epi32(signs, QUAD < 2 ? 0 : QUAD - 2);
  return _mm256_or_si256(_mm256_and_si256(shifted_bytes, _mm256_set1_epi8(3)),
                         _mm256_and_si256(aligned, _mm256_set1_epi8(4)));
}

template <int D>
struct HybridKeys2 {
  static constexpr int PARTS = 2, GROUPS = D / 32, STRIDE = D / 4;
  static_assert(8 <= SUMS<3>);  // quads of a group

  struct Work {
    uint16_t norm[D];
    float step[ROWS][GROUPS], sum[ROWS][GROUPS];  // of a row's group: scale of its fixed point, sum of q'
    alignas(32) int8_t q8[ROWS / 4][PARTS][4][D];
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static void begin(Task&) {}

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    if (task.prepared != slab.page) prepare(task, slab.page + task.layout->page_at[0], work);
    task.prepared = slab.page;
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  static void prepare(const Task& task, const uint8_t* norm, Work& work) {
    if (task.prepared && !std::memcmp(work.norm, norm, sizeof work.norm)) return;
    std::memcpy(work.norm, norm, sizeof work.norm);
    for (int row = 0; row < task.rows; ++row)
      for (int g = 0; g < GROUPS; ++g) {
        const int c = 32 * g;
        int8_t* hi = work.q8[row / 4][0][row % 4] + c;
        int8_t* lo = work.q8[row / 4][1][row % 4] + c;
        __m256 x[4], largest = _mm256_setzero_ps();
        unroll<4>([&](auto v) KVQ_LAMBDA {
          const __m256 q = _mm256_loadu_ps(task.query + row * D + c + 8 * v);
          x[v] = _mm256_mul_ps(q, load_halves(norm + 2 * (c + 8 * v)));
          largest = _mm256_max_ps(largest, absolute(x[v]));
        });
        const float top = reduce<Max>(largest) + 1e-30f;
        work.step[row][g] = top / RANGE<PARTS>;
        __m256 total = _mm256_setzero_ps();
        unroll<4>([&](auto v) KVQ_LAMBDA {
          x[v] = _mm256_mul_ps(x[v], _mm256_set1_ps(RANGE<PARTS> / top));
          // the sum of the rounded q', so that its errors multiply k and not the larger u
          total = _mm256_add_ps(total, _mm256_round_ps(x[v], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        });
        work.sum[row][g] = work.step[row][g] * reduce<Add>(total);
        pack32(x, hi, lo);
      }
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    constexpr int X = R * PARTS, T = VECTORS<X>;
    const Layout& l = *task.layout;
    const uint8_t* codes = slab.data + l.key_at[0];
    const int8_t* q8 = work.q8[row / 4][0][0];
    for (int token = 0; token < SLAB; token += 8 * T) {
      __m256 scores[R][T];
      clear(scores);
      for (int g = 0; g < GROUPS; ++g) {
        HybridParameters p[T];
        unroll<T>([&](auto t) KVQ_LAMBDA {
          const int at = g * SLAB + token + 8 * t;
          p[t].read(slab.data + l.key_at[1] + 2 * at, slab.data + l.key_at[2] + 4 * at);
        });
        __m256i acc[X][T];
        clear(acc);
        unroll<8>([&](auto e) KVQ_LAMBDA {
          const int c = 32 * g + 4 * e;
          const __m256i shift = _mm256_set1_epi32(c / STRIDE * 2);
          const uint8_t* word = codes + c % STRIDE * 32 + token * 4;
          __m256i code[T];
          unroll<T>([&](auto t) KVQ_LAMBDA {
            code[t] = hybrid_codes<e>(_mm256_srlv_epi32(load_bytes(word + 32 * t), shift), p[t].signs);
          });
          if (e % 4 == 0) task.prefetch.template lines<1>();
          unroll<X>([&](auto x) KVQ_LAMBDA {
            constexpr int part = x / R, r = x % R;
            const __m256i b = quad(q8 + (part * 4 + r) * D + c);
            unroll<T>([&](auto t) KVQ_LAMBDA { dot(acc[x][t], code[t], b); });
          });
        });
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m256 step = _mm256_set1_ps(work.step[row + r][g]), sum = _mm256_set1_ps(work.sum[row + r][g]);
          unroll<T>([&](auto t) KVQ_LAMBDA {
            const __m256 zeros = _mm256_fmadd_ps(p[t].zero, sum, scores[r][t]);
            const __m256 x = _mm256_cvtepi32_ps(join(acc[r][t], acc[R + r][t]));
            scores[r][t] = _mm256_fmadd_ps(x, _mm256_mul_ps(p[t].scale, step), zeros);
          });
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        unroll<T>([&](auto t) KVQ_LAMBDA {
          _mm256_storeu_ps(task.scores + (row + r) * BLOCK + column + token + 8 * t, scores[r][t]);
        });
      });
    }
  }
};

}  // namespace avx2
}  // namespace

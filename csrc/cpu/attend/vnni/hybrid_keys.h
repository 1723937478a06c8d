// InnerQ keys, 2 bits: per token and group of 32 channels a scale and either a zero or 32 sign bits.
//
//     q . k_t = sum_g ( |scale_gt| sum_c q'_c u_ct + zero_gt sum_c q'_c ),    q' = q * norm
//     symmetric:  u = code + 4 sign,  zero = -4 |scale|        asymmetric:  u = code
//
// so the sign is one more bit of an unsigned code. q' becomes fixed point once per norm, which changes at most from
// page to page; scales multiply 16 tokens' partial scores at once.
#pragma once

#include "../kernel.h"
#include "../../isa/vnni.h"

namespace {
namespace vnni {

using namespace kvq;

// The parameters of 16 groups: what a slot holds depends on the sign of the scale.
struct HybridParameters {
  __m512 scale, zero;
  __m512i signs;  // shifted such that (signs >> e) & 4 is the sign of the slot's quad e

  KVQ_INLINE HybridParameters(const uint8_t* scales, const uint8_t* slots) {
    const __m512 stored = load_halves(scales);
    const __m512i slot = load_bytes(slots);
    const __mmask16 symmetric = _mm512_movepi32_mask(_mm512_castps_si512(stored));
    scale = _mm512_abs_ps(stored);
    zero = _mm512_mask_mul_ps(_mm512_castsi512_ps(slot), symmetric, stored, _mm512_set1_ps(4.0f));
    signs = _mm512_maskz_mov_epi32(symmetric, slot);
  }
};

// The codes of one quad: two bits from the bytes, the third from the sign words. (word >> quad) & 0x01010101 are the
// quad's signs, so shifted to bit 2 that is a shift by quad - 2.
template <int QUAD>
KVQ_INLINE __m512i hybrid_codes(__m512i shifted_bytes, __m512i signs) {
  const __m512i aligned = QUAD < 2 ? _mm512_slli_epi32(signs, QUAD < 2 ? 2 - QUAD : 0)
                                   : _mm512_srli_epi32(signs, QUAD < 2 ? 0 : QUAD - 2);
  const __m512i low = _mm512_and_si512(shifted_bytes, _mm512_set1_epi8(3));
  return _mm512_ternarylogic_epi32(low, aligned, _mm512_set1_epi8(4), 0xF8);  // low | (aligned & 4)
}

template <int D>
struct HybridKeys2 {
  static constexpr int PARTS = 2, GROUPS = D / 32, STRIDE = D / 4;

  struct Work {
    uint16_t norm[D];
    float step[ROWS][GROUPS], sum[ROWS][GROUPS];  // of a row's group: scale of its fixed point, sum of q'
    alignas(64) int8_t q8[ROWS / 4][PARTS][4][D];
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static void begin(Task&) {}

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    if (task.prepared != slab.page) prepare(task, slab.page + task.layout->k_inner_norm, work);
    task.prepared = slab.page;
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  static void prepare(const Task& task, const uint8_t* norm, Work& work) {
    if (task.prepared && !std::memcmp(work.norm, norm, sizeof work.norm)) return;
    std::memcpy(work.norm, norm, sizeof work.norm);
    const __m512 magic = _mm512_set1_ps(MAGIC<PARTS>);
    for (int row = 0; row < task.rows; ++row) {
      int8_t* hi = work.q8[row / 4][0][row % 4];
      int8_t* lo = work.q8[row / 4][1][row % 4];
      for (int c = 0; c < D; c += 64) {
        __m512 x[4];
        for (int v = 0; v < 4; ++v)
          x[v] = _mm512_mul_ps(_mm512_loadu_ps(task.query + row * D + c + 16 * v), load_halves(norm + 2 * (c + 16 * v)));
        for (int v = 0; v < 4; v += 2) {
          const float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x[v]), _mm512_abs_ps(x[v + 1]))) + 1e-30f;
          const int g = c / 32 + v / 2;
          work.step[row][g] = top / RANGE<PARTS>;
          for (int i = v; i < v + 2; ++i) x[i] = _mm512_fmadd_ps(x[i], _mm512_set1_ps(RANGE<PARTS> / top), magic);
          // the sum of the rounded q', so that its errors multiply k and not the larger u
          const __m512 a = _mm512_sub_ps(x[v], magic), b = _mm512_sub_ps(x[v + 1], magic);
          work.sum[row][g] = work.step[row][g] * _mm512_reduce_add_ps(_mm512_add_ps(a, b));
        }
        pack4<PARTS>(x, hi + c, lo + c);
      }
    }
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    const Layout& l = *task.layout;
    const uint8_t* codes = slab.data + l.k_codes;
    const int8_t* q8 = work.q8[row / 4][0][0];
    __m512 scores[R][2];
    unroll<R>([&](auto r) KVQ_LAMBDA { scores[r][0] = scores[r][1] = _mm512_setzero_ps(); });
    for (int g = 0; g < GROUPS; ++g) {
      const HybridParameters low(slab.data + l.k_scale + g * 64, slab.data + l.k_slot + g * 128);
      const HybridParameters high(slab.data + l.k_scale + g * 64 + 32, slab.data + l.k_slot + g * 128 + 64);
      __m512i sums[CHAINS<R>][R * PARTS][2];
      auto& acc = sums[0];
      unroll<CHAINS<R>>([&](auto chain) KVQ_LAMBDA {
        unroll<R * PARTS>([&](auto x) KVQ_LAMBDA { sums[chain][x][0] = sums[chain][x][1] = _mm512_setzero_si512(); });
      });
      // a group's channels lie in one plane, or its halves in two
      const __m512i by[2] = {_mm512_set1_epi32(32 * g / STRIDE * 2), _mm512_set1_epi32((32 * g + 16) / STRIDE * 2)};
      const char* ahead = task.prefetch.template take<8>();
      unroll<8>([&](auto e) KVQ_LAMBDA {
        const int c = 32 * g + 4 * e;
        const uint8_t* word = codes + c % STRIDE * 32;
        const __m512i c0 = hybrid_codes<e>(_mm512_srlv_epi32(load_bytes(word), by[e / 4]), low.signs);
        const __m512i c1 = hybrid_codes<e>(_mm512_srlv_epi32(load_bytes(word + 64), by[e / 4]), high.signs);
        __builtin_prefetch(ahead + 64 * e, 0, 3);
        unroll<R * PARTS>([&](auto x) KVQ_LAMBDA {
          constexpr int part = x / R, r = x % R;
          const __m512i b = quad(q8 + (part * 4 + r) * D + c);
          dot(sums[e % CHAINS<R>][x][0], c0, b);
          dot(sums[e % CHAINS<R>][x][1], c1, b);
        });
      });
      add_chains(sums);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512 step = _mm512_set1_ps(work.step[row + r][g]), sum = _mm512_set1_ps(work.sum[row + r][g]);
        const auto add = [&](int half, const HybridParameters& p) __attribute__((always_inline)) {
          const __m512 zeros = _mm512_fmadd_ps(p.zero, sum, scores[r][half]);
          scores[r][half] = _mm512_fmadd_ps(join(acc[r][half], acc[R + r][half]), _mm512_mul_ps(p.scale, step), zeros);
        };
        add(0, low);
        add(1, high);
      });
    }
    unroll<R>([&](auto r) KVQ_LAMBDA {
      float* to = task.scores + (row + r) * BLOCK + column;
      _mm512_storeu_ps(to, scores[r][0]);
      _mm512_storeu_ps(to + 16, scores[r][1]);
    });
  }
};

}  // namespace vnni
}  // namespace

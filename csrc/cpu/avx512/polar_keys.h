// PolarQuant keys, 4-bit angles with 4- or 2-bit radii, by table.
//
//     q . k_t = sum_p r_pt (x_p cos phi_pt + y_p sin phi_pt),    (x_p, y_p) the query's pair p
//
// Per page and row the 16 values x_p cos + y_p sin of every pair become fixed point (hi and lo bytes); so do the 16
// radii, unsigned 16 bits in the pair's own unit, which goes into the former:
//
//     r T = (r_hi + r_lo / 256) (256 T_hi + T_lo) ~ r_hi (256 T_hi + T_lo) + r_lo T_hi
//
// One byte shuffle looks up 64 codes, one dot product takes 4 pairs of 16 tokens. A table register holds 4 pairs:
// byte 4 code + pair % 4.
#pragma once

#include "../kernel.h"
#include "lanes.h"
#include "trigonometry.h"

namespace {
namespace avx512 {

using namespace kvq;

template <int D, int RADIUS_BITS>
struct PolarKeys {
  static constexpr int PARTS = 2, PAIRS = D / 2, QUADS = PAIRS / 4, CODES = 16, STEPS = 1 << RADIUS_BITS;
  static constexpr int LINES = 2;

  struct Work {
    alignas(64) int8_t table[ROWS / 4][PARTS][4][QUADS][64];
    alignas(64) uint8_t radius[2][QUADS][64];  // high bytes, low bytes
    alignas(64) float x[ROWS][PAIRS], y[ROWS][PAIRS];
    alignas(64) float cosine[CODES][PAIRS], sine[CODES][PAIRS];  // of this page, in units of the radius
    alignas(64) float longest[PAIRS];
    float step[ROWS];
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    const int32_t* pairs = task.constants->pairs;
    for (int r = 0; r < task.rows; ++r)
      for (int p = 0; p < PAIRS; ++p) {
        work.x[r][p] = task.query[r * D + pairs[p]];
        work.y[r][p] = task.query[r * D + pairs[PAIRS + p]];
      }
  }

  static void score(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    if (task.prepared != slab.page) {
      read_grid(*task.layout, slab.page, work);
      for (int row = 0; row < task.rows; ++row) fill_table(row, work);
    }
    task.prepared = slab.page;
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, slab, column, row, work); });
  }

  // Bytes of radii and, with their unit folded in, cosines and sines of all angles of the page.
  static __attribute__((noinline)) void read_grid(const Layout& l, const uint8_t* page, Work& work) {
    constexpr int VECTORS = PAIRS / 16;
    __m512 s[VECTORS], c[VECTORS], turn_s[VECTORS], turn_c[VECTORS];
    unroll<VECTORS>([&](auto v) KVQ_LAMBDA {
      const auto grid = [&](int i) { return load_halves(page + l.page_at[i] + 32 * v); };
      const __m512 half = _mm512_set1_ps(0.5f), angle_step = grid(1), radius_step = grid(3);
      const __m512 unit = round_radii(_mm512_fmadd_ps(half, radius_step, grid(2)), radius_step, 16 * v, work);
      sine_cosine(_mm512_fmadd_ps(half, angle_step, grid(0)), s[v], c[v]);
      sine_cosine(angle_step, turn_s[v], turn_c[v]);
      s[v] = _mm512_mul_ps(s[v], unit);
      c[v] = _mm512_mul_ps(c[v], unit);
      _mm512_store_ps(work.longest + 16 * v, unit);
    });
    for (int a = 0; a < CODES; ++a)
      unroll<VECTORS>([&](auto v) KVQ_LAMBDA {
        _mm512_store_ps(work.cosine[a] + 16 * v, c[v]);
        _mm512_store_ps(work.sine[a] + 16 * v, s[v]);
        const __m512 turned = _mm512_fmsub_ps(c[v], turn_c[v], _mm512_mul_ps(s[v], turn_s[v]));
        s[v] = _mm512_fmadd_ps(c[v], turn_s[v], _mm512_mul_ps(s[v], turn_c[v]));
        c[v] = turned;
      });
  }

  // The radii r0 + i step as 16-bit integers in units of 1 / 256; returns the units of 16 pairs.
  KVQ_INLINE static __m512 round_radii(__m512 r0, __m512 step, int p, Work& work) {
    const __m512 last = _mm512_fmadd_ps(step, _mm512_set1_ps(float(STEPS - 1)), r0);
    const __m512 factor = _mm512_div_ps(_mm512_set1_ps(65280.0f), last);
    by_quads([&](int i) __attribute__((always_inline)) {
      const __m512 radius = _mm512_fmadd_ps(step, _mm512_set1_ps(float(i)), r0);
      return _mm512_fmadd_ps(radius, factor, _mm512_set1_ps(MAGIC<1>));
    }, work.radius[0][p / 4], work.radius[1][p / 4], 0);
    return _mm512_mul_ps(last, _mm512_set1_ps(1 / 255.0f));
  }

  // table[quad][4 a + j] = fixed point of x cos + y sin of pair 4 quad + j at angle a
  static __attribute__((noinline)) void fill_table(int row, Work& work) {
    __m512 largest = _mm512_setzero_ps();
    for (int p = 0; p < PAIRS; p += 16) {
      const __m512 x = _mm512_load_ps(work.x[row] + p), y = _mm512_load_ps(work.y[row] + p);
      const __m512 length = _mm512_sqrt_ps(_mm512_fmadd_ps(x, x, _mm512_mul_ps(y, y)));
      largest = _mm512_max_ps(largest, _mm512_mul_ps(length, _mm512_load_ps(work.longest + p)));
    }
    const float top = _mm512_reduce_max_ps(largest) * 1.0001f + 1e-30f;
    work.step[row] = top / RANGE<PARTS>;
    const __m512 factor = _mm512_set1_ps(RANGE<PARTS> / top), magic = _mm512_set1_ps(MAGIC<PARTS>);
    for (int p = 0; p < PAIRS; p += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_load_ps(work.x[row] + p), factor);
      const __m512 y = _mm512_mul_ps(_mm512_load_ps(work.y[row] + p), factor);
      by_quads([&](int a) __attribute__((always_inline)) {
        const __m512 xc = _mm512_mul_ps(x, _mm512_load_ps(work.cosine[a] + p));
        return _mm512_add_ps(_mm512_fmadd_ps(y, _mm512_load_ps(work.sine[a] + p), xc), magic);
      }, work.table[row / 4][0][row % 4][p / 4], work.table[row / 4][1][row % 4][p / 4], 0x80);
    }
  }

  // Two bytes of 16 codes' values of 16 pairs, value(code) with MAGIC added: to[4 quads][4 code + pair % 4]. The low
  // bytes are flipped by `flip`.
  template <class Value, class Byte>
  KVQ_INLINE static void by_quads(Value value, Byte* hi, Byte* lo, int flip) {
    const __m512i index = load_bytes(PACK2.of), flips = _mm512_set1_epi8(char(flip));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i part[2][4];  // of 4 codes each: [4 quads][code][4 pairs]
    unroll<4>([&](auto i) KVQ_LAMBDA {
      __m512i v[4];
      unroll<4>([&](auto j) KVQ_LAMBDA { v[j] = _mm512_castps_si512(value(4 * i + j)); });
      const __m512i ab = _mm512_permutex2var_epi8(v[0], index, v[1]), cd = _mm512_permutex2var_epi8(v[2], index, v[3]);
      part[0][i] = _mm512_permutexvar_epi32(order, _mm512_shuffle_i64x2(ab, cd, 0xEE));
      part[1][i] = _mm512_permutexvar_epi32(order, _mm512_xor_si512(_mm512_shuffle_i64x2(ab, cd, 0x44), flips));
    });
    unroll<2>([&](auto h) KVQ_LAMBDA {
      Byte* to = h == 0 ? hi : lo;
      const __m512i ab = _mm512_shuffle_i64x2(part[h][0], part[h][1], 0x44);  // quads 0 1 of codes 0-3, 4-7
      const __m512i cd = _mm512_shuffle_i64x2(part[h][2], part[h][3], 0x44);
      const __m512i ef = _mm512_shuffle_i64x2(part[h][0], part[h][1], 0xEE);  // quads 2 3
      const __m512i gh = _mm512_shuffle_i64x2(part[h][2], part[h][3], 0xEE);
      _mm512_store_si512(to, _mm512_shuffle_i64x2(ab, cd, 0x88));
      _mm512_store_si512(to + 64, _mm512_shuffle_i64x2(ab, cd, 0xDD));
      _mm512_store_si512(to + 128, _mm512_shuffle_i64x2(ef, gh, 0x88));
      _mm512_store_si512(to + 192, _mm512_shuffle_i64x2(ef, gh, 0xDD));
    });
  }

  // Bytes 4 code + pair % 4 of pair quad Q, 16 tokens.
  template <int Q>
  KVQ_INLINE static __m512i angles(const uint8_t* codes) {
    constexpr int plane = RADIUS_BITS == 4 ? 0 : Q / (QUADS / 2), at = RADIUS_BITS == 4 ? Q : Q % (QUADS / 2);
    const __m512i w = load_bytes(codes + at * 128);
    return index(plane == 0 ? _mm512_slli_epi32(w, 2) : _mm512_srli_epi32(w, 2), 0x3C);
  }
  template <int Q>
  KVQ_INLINE static __m512i radii(const uint8_t* codes) {
    if constexpr (RADIUS_BITS == 4) return index(_mm512_srli_epi32(load_bytes(codes + Q * 128), 2), 0x3C);
    constexpr int plane = Q / (QUADS / 4), at = Q % (QUADS / 4);
    const __m512i w = load_bytes(codes + at * 128);
    if constexpr (plane == 0) return index(_mm512_slli_epi32(w, 2), 0x0C);
    return index(_mm512_srli_epi32(w, plane == 0 ? 0 : 2 * plane - 2), 0x0C);
  }
  KVQ_INLINE static __m512i index(__m512i shifted, int mask) {
    return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi8(char(mask)), _mm512_set1_epi32(0x03020100), 0xEA);
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, const Slab& slab, int column, int row, const Work& work) {
    const Layout& l = *task.layout;
    const auto& table = work.table[row / 4];
    for (int half = 0; half < 2; ++half) {
      const uint8_t* angle_codes = slab.data + l.key_at[0] + half * 64;
      const uint8_t* radius_codes = RADIUS_BITS == 4 ? angle_codes : slab.data + l.key_at[1] + half * 64;
      __m512i acc[R * 3];  // r_hi T_hi, r_hi T_lo, r_lo T_hi
      unroll<R * 3>([&](auto x) KVQ_LAMBDA { acc[x] = _mm512_setzero_si512(); });
      unroll<QUADS>([&](auto q) KVQ_LAMBDA {
        const __m512i angle = angles<q>(angle_codes), radius = radii<q>(radius_codes);
        const __m512i radius_hi = _mm512_permutexvar_epi8(radius, load_bytes(work.radius[0][q]));
        const __m512i radius_lo = _mm512_permutexvar_epi8(radius, load_bytes(work.radius[1][q]));
        if (q % 2 == 0) task.prefetch.template lines<LINES>();
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m512i hi = _mm512_permutexvar_epi8(angle, load_bytes(table[0][r][q]));
          dot(acc[r], radius_hi, hi);
          dot(acc[R + r], radius_hi, _mm512_permutexvar_epi8(angle, load_bytes(table[1][r][q])));
          dot(acc[2 * R + r], radius_lo, hi);
        });
      });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        // in units of T_lo r_hi; r_lo T_hi is 256 / 256 of one
        const __m512 s = _mm512_mul_ps(join(acc[r], _mm512_add_epi32(acc[R + r], acc[2 * R + r])), _mm512_set1_ps(work.step[row + r]));
        _mm512_storeu_ps(task.scores + (row + r) * BLOCK + column + 16 * half, s);
      });
    }
  }
};

}  // namespace avx512
}  // namespace

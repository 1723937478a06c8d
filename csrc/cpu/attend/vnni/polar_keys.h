//     q . k_t = sum_p r_pt (x_p cos phi_pt + y_p sin phi_pt),    (x_p, y_p) the query's pair p
//     r T = (r_hi + r_lo / 256) (256 T_hi + T_lo) ~ r_hi (256 T_hi + T_lo) + r_lo T_hi
//
// PolarQuant's keys (formats/methods/polar.py), by tables. Per page and row, T holds the 16 values x_p cos + y_p sin of every
// pair in fixed point, in two bytes; the up to 16 radii are unsigned numbers of 16 bits, in a unit of their pair that
// goes into T. 4-bit angles with 4- or 2-bit radii are read as they are stored; polar_codes.h joins others to nibbles.
//
// One byte shuffle looks up 64 codes; one dot product takes 4 pairs of 16 tokens. A table register holds 4 pairs: byte
// 4 code + pair % 4.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"
#include "../integer/polar_codes.h"
#include "trigonometry.h"

namespace {
namespace integer {

using namespace kvq;

// Bytes of 16-bit numbers, the low (part 0) or the high ones (1), of two vectors [8 codes][4 pairs]: the first one's
// codes are 7 .. 0 if `mirrored`, else 0 .. 7; the second's are 8 .. 15.
struct ByteOfCode {
  alignas(64) uint8_t of[64];
  constexpr ByteOfCode(int part, bool mirrored) : of() {
    for (int i = 0; i < 64; ++i) {
      const int code = i / 4, row = code < 8 ? (mirrored ? 7 - code : code) : code;
      of[i] = uint8_t(8 * row + 2 * (i % 4) + part);
    }
  }
};
constexpr ByteOfCode LOW(0, false), HIGH(1, false), MIRRORED_LOW(0, true), MIRRORED_HIGH(1, true);

// The low halves of 2 x 16 numbers of 32 bits, 4 of the one and 4 of the other in turn.
struct HalvesInTurn {
  alignas(64) uint16_t of[32];
  constexpr HalvesInTurn() : of() {
    for (int i = 0; i < 32; ++i) of[i] = uint16_t(32 * (i / 4 % 2) + 2 * (i / 8 * 4 + i % 4));
  }
};
constexpr HalvesInTurn HALVES;

// code / last code, in units of 2^-16, of 4 pairs each
struct Fractions {
  alignas(64) uint16_t of[16][4];
  constexpr explicit Fractions(int steps) : of() {
    for (int code = 0; code < steps; ++code)
      for (int j = 0; j < 4; ++j) of[code][j] = uint16_t(code * 65535 / (steps - 1));
  }
};
constexpr Fractions FRACTIONS_OF_4(4), FRACTIONS_OF_16(16);

template <int D, int RADIUS_BITS>
struct PolarKeys {
  static constexpr int PAIRS = D / 2, QUADS = PAIRS / 4, CODES = 16;

  struct Work {
    alignas(64) int8_t table[ROWS / 4][PARTS][4][QUADS][64];
    alignas(64) uint8_t radius[2][QUADS][64];  // high bytes, low bytes
    alignas(64) float x[ROWS][PAIRS], y[ROWS][PAIRS];
    // of this page: the middle angle in the radii's units, and what an angle k + 1/2 steps from it is turned by
    alignas(64) float middle_cosine[PAIRS], middle_sine[PAIRS];
    alignas(64) int16_t cosine[QUADS][CODES / 2][4], sine[QUADS][CODES / 2][4];  // times 32767
    alignas(64) uint8_t codes[PAIRS * SLAB];
    const uint8_t *angles, *radii;  // codes of this slab; those of 4 bits are in the same bytes
    float step[ROWS];
    PolarGrid grid;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    work.grid = PolarGrid(*task.layout, (CODES - 1) / 2.0f, 0.5f);
    const int32_t* pairs = task.constants->pairs;
    for (int r = 0; r < task.rows; ++r)
      for (int p = 0; p < PAIRS; ++p) {
        work.x[r][p] = task.query[r * D + pairs[p]];
        work.y[r][p] = task.query[r * D + pairs[PAIRS + p]];
      }
  }

  static void score(Task& task, const Slab& slab, int column) { score_codes<false>(task, slab, column); }

  template <bool JOINED>
  KVQ_INLINE static void score_codes(Task& task, const Slab& slab, int column) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    if (task.prepared != slab.page) {
      read_grid(*task.layout, slab.page, work);
      row_tiles(task.rows, [&](auto r, int row) { fill_tables<decltype(r)::value>(row, work); });
    }
    task.prepared = slab.page;
    const Layout& l = *task.layout;
    if constexpr (JOINED) join_codes<PAIRS>(l, slab, work.codes);
    work.angles = JOINED ? work.codes : slab.data + (RADIUS_BITS == 4 ? l.k_polar : l.k_angle);
    work.radii = slab.data + l.k_radius;
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, column, row, work); });
  }

  static __attribute__((noinline)) void read_grid(const Layout& l, const uint8_t* page, Work& work) {
    alignas(64) uint16_t least[PAIRS], span[PAIRS];  // of the radii, in units of 1 / 256
    for (int p = 0; p < PAIRS; p += 16) {
      const auto field = [&](int64_t at) KVQ_LAMBDA { return L::load_halves(page + at + 2 * p); };
      const PolarCells<__m512> cells(l, work.grid, field);
      const __m512 widest = _mm512_set1_ps(65280.0f);
      const __m512i low = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_mul_ps(cells.first, widest), cells.last));
      _mm256_store_si256((__m256i*)(least + p), _mm512_cvtusepi32_epi16(low));
      // one more than to the largest radius: fractions round down, and the paper's radii are then whole high bytes
      _mm256_store_si256((__m256i*)(span + p), _mm512_cvtusepi32_epi16(_mm512_sub_epi32(_mm512_set1_epi32(65281), low)));

      const __m512 unit = _mm512_mul_ps(cells.last, _mm512_set1_ps(1 / 255.0f));
      __m512 s[CODES / 2], c[CODES / 2], middle_s, middle_c;
      sine_cosine(cells.angle, middle_s, middle_c);
      _mm512_store_ps(work.middle_sine + p, _mm512_mul_ps(middle_s, unit));
      _mm512_store_ps(work.middle_cosine + p, _mm512_mul_ps(middle_c, unit));
      // half a step is at most a 32nd of a turn, then turned by one step, by two, by four
      __m512 turn_s, turn_c;
      small_sine_cosine(cells.turn, turn_s, turn_c);
      s[0] = _mm512_mul_ps(turn_s, _mm512_set1_ps(32767.0f));
      c[0] = _mm512_mul_ps(turn_c, _mm512_set1_ps(32767.0f));
      unroll<3>([&](auto k) KVQ_LAMBDA {
        constexpr int n = 1 << k;
        const __m512 doubled = _mm512_fmsub_ps(turn_c, turn_c, _mm512_mul_ps(turn_s, turn_s));
        turn_s = _mm512_mul_ps(_mm512_add_ps(turn_s, turn_s), turn_c);
        turn_c = doubled;
        unroll<n>([&](auto i) KVQ_LAMBDA {
          c[n + i] = _mm512_fmsub_ps(c[i], turn_c, _mm512_mul_ps(s[i], turn_s));
          s[n + i] = _mm512_fmadd_ps(c[i], turn_s, _mm512_mul_ps(s[i], turn_c));
        });
      });
      by_quads(c, &work.cosine[p / 4]);
      by_quads(s, &work.sine[p / 4]);
    }
    const auto& fractions = l.radius_bits == 4 ? FRACTIONS_OF_16.of : FRACTIONS_OF_4.of;
    for (int q = 0; q < QUADS; ++q) {
      const __m512i wide = four(span + 4 * q), from = four(least + 4 * q);
      const auto radii = [&](int code) KVQ_LAMBDA {
        return _mm512_add_epi16(_mm512_mulhi_epu16(wide, L::load_bytes(fractions[code])), from);
      };
      const __m512i a = radii(0), b = RADIUS_BITS == 4 ? radii(8) : a;
      _mm512_store_si512(work.radius[0][q], _mm512_permutex2var_epi8(a, L::load_bytes(HIGH.of), b));
      _mm512_store_si512(work.radius[1][q], _mm512_permutex2var_epi8(a, L::load_bytes(LOW.of), b));
    }
  }

  // The same 4 numbers in all lanes.
  template <class T>
  KVQ_INLINE static __m512i four(const T* p) {
    int64_t numbers;
    std::memcpy(&numbers, p, 8);
    return _mm512_set1_epi64(numbers);
  }

  // 8 codes' values of 16 pairs, rounded, to[4 quads][code][pair % 4]
  KVQ_INLINE static void by_quads(const __m512 (&value)[8], int16_t (*to)[8][4]) {
    const __m512i index = L::load_bytes(HALVES.of);
    __m512i two[4];  // of 2 codes each: [4 quads][code][4 pairs]
    unroll<4>([&](auto i) KVQ_LAMBDA {
      const __m512i a = _mm512_cvtps_epi32(value[2 * i]);
      const __m512i b = _mm512_cvtps_epi32(value[2 * i + 1]);
      two[i] = _mm512_permutex2var_epi16(a, index, b);
    });
    const __m512i ab = _mm512_shuffle_i64x2(two[0], two[1], 0x44), cd = _mm512_shuffle_i64x2(two[2], two[3], 0x44);
    const __m512i ef = _mm512_shuffle_i64x2(two[0], two[1], 0xEE), gh = _mm512_shuffle_i64x2(two[2], two[3], 0xEE);
    _mm512_store_si512(to[0], _mm512_shuffle_i64x2(ab, cd, 0x88));
    _mm512_store_si512(to[1], _mm512_shuffle_i64x2(ab, cd, 0xDD));
    _mm512_store_si512(to[2], _mm512_shuffle_i64x2(ef, gh, 0x88));
    _mm512_store_si512(to[3], _mm512_shuffle_i64x2(ef, gh, 0xDD));
  }

  // table[quad][4 a + j] = fixed point of x cos + y sin of pair 4 quad + j at angle a. With (u, v) the query's pair
  // seen from the middle angle, angles of equal distance t to it share two products: u cos t +- v sin t. R rows at
  // once: their chains of maximum, root and quotient would wait for themselves.
  template <int R>
  static __attribute__((noinline)) void fill_tables(int row, Work& work) {
    alignas(64) float u[R][PAIRS], v[R][PAIRS];
    __m512 largest[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = _mm512_set1_ps(1e-30f); });
    for (int p = 0; p < PAIRS; p += 16) {
      const __m512 c = _mm512_load_ps(work.middle_cosine + p), s = _mm512_load_ps(work.middle_sine + p);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512 x = _mm512_load_ps(work.x[row + r] + p), y = _mm512_load_ps(work.y[row + r] + p);
        const __m512 along = _mm512_fmadd_ps(x, c, _mm512_mul_ps(y, s));
        const __m512 across = _mm512_fmsub_ps(y, c, _mm512_mul_ps(x, s));
        _mm512_store_ps(u[r] + p, along);
        _mm512_store_ps(v[r] + p, across);
        largest[r] = _mm512_max_ps(largest[r], _mm512_fmadd_ps(along, along, _mm512_mul_ps(across, across)));
      });
    }
    const __m128 top = _mm_sqrt_ps(reduce4<Max>(largest));
    alignas(16) float factors[4], steps[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    _mm_store_ps(steps, _mm_mul_ps(top, _mm_set1_ps(1 / RANGE)));
    alignas(32) int16_t u16[R][PAIRS], v16[R][PAIRS];
    unroll<R>([&](auto r) KVQ_LAMBDA {
      work.step[row + r] = steps[r];
      const __m512 factor = _mm512_set1_ps(factors[r]);
      for (int p = 0; p < PAIRS; p += 16) {
        const auto fixed = [&](const float* f) KVQ_LAMBDA {
          return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(f + p), factor)));
        };
        _mm256_store_si256((__m256i*)(u16[r] + p), fixed(u[r]));
        _mm256_store_si256((__m256i*)(v16[r] + p), fixed(v[r]));
      }
    });
    const __m512i low = L::load_bytes(MIRRORED_LOW.of), high = L::load_bytes(MIRRORED_HIGH.of);
    for (int q = 0; q < QUADS; ++q) {
      const __m512i cosine = L::load_bytes(work.cosine[q]), sine = L::load_bytes(work.sine[q]);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const __m512i uc = _mm512_mulhrs_epi16(four(u16[r] + 4 * q), cosine);
        const __m512i vs = _mm512_mulhrs_epi16(four(v16[r] + 4 * q), sine);
        const __m512i even = _mm512_add_epi16(uc, _mm512_set1_epi16(128));  // 256 hi + (lo + 128)
        const __m512i before = _mm512_sub_epi16(even, vs), after = _mm512_add_epi16(even, vs);
        const __m512i lo = _mm512_permutex2var_epi8(before, low, after);
        _mm512_store_si512(work.table[row / 4][0][r][q], _mm512_permutex2var_epi8(before, high, after));
        _mm512_store_si512(work.table[row / 4][1][r][q], _mm512_xor_si512(lo, _mm512_set1_epi8(char(0x80))));
      });
    }
  }

  // Bytes 4 code + pair % 4 of pair quad Q, 16 tokens.
  template <int Q>
  KVQ_INLINE static __m512i angles(const uint8_t* codes) {
    constexpr int plane = RADIUS_BITS == 4 ? 0 : Q / (QUADS / 2), at = RADIUS_BITS == 4 ? Q : Q % (QUADS / 2);
    const __m512i w = L::load_bytes(codes + at * 128);
    return index(plane == 0 ? _mm512_slli_epi32(w, 2) : _mm512_srli_epi32(w, 2), 0x3C);
  }
  template <int Q>
  KVQ_INLINE static __m512i radii(const uint8_t* codes) {
    if constexpr (RADIUS_BITS == 4) return index(_mm512_srli_epi32(L::load_bytes(codes + Q * 128), 2), 0x3C);
    constexpr int plane = Q / (QUADS / 4), at = Q % (QUADS / 4);
    const __m512i w = L::load_bytes(codes + at * 128);
    if constexpr (plane == 0) return index(_mm512_slli_epi32(w, 2), 0x0C);
    return index(_mm512_srli_epi32(w, plane == 0 ? 0 : 2 * plane - 2), 0x0C);
  }
  KVQ_INLINE static __m512i index(__m512i shifted, int mask) {
    return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi8(char(mask)), _mm512_set1_epi32(0x03020100), 0xEA);
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, int column, int row, const Work& work) {
    const auto& table = work.table[row / 4];
    for (int half = 0; half < 2; ++half) {
      const uint8_t* angle_codes = work.angles + half * 64;
      const uint8_t* radius_codes = RADIUS_BITS == 4 ? angle_codes : work.radii + half * 64;
      __m512i acc[R * 3][2];  // r_hi T_hi, r_hi T_lo, r_lo T_hi, of even and odd quads if the rows are few
      constexpr int CHAINS = R <= 2 ? 2 : 1;
      unroll<R * 3>([&](auto x) KVQ_LAMBDA { acc[x][0] = acc[x][1] = _mm512_setzero_si512(); });
      // with the values' lines that is a page of 4-bit radii and its parameters
      const char* ahead = task.prefetch.template take<QUADS + QUADS / 4>();
      unroll<QUADS>([&](auto q) KVQ_LAMBDA {
        const __m512i angle = angles<q>(angle_codes), radius = radii<q>(radius_codes);
        const __m512i radius_hi = _mm512_permutexvar_epi8(radius, L::load_bytes(work.radius[0][q]));
        const __m512i radius_lo = _mm512_permutexvar_epi8(radius, L::load_bytes(work.radius[1][q]));
        __builtin_prefetch(ahead + 64 * q, 0, 3);
        if (q % 4 == 0) __builtin_prefetch(ahead + 64 * (QUADS + q / 4), 0, 3);
        unroll<R>([&](auto r) KVQ_LAMBDA {
          const __m512i hi = _mm512_permutexvar_epi8(angle, L::load_bytes(table[0][r][q]));
          constexpr int chain = q % CHAINS;
          dot(acc[r][chain], radius_hi, hi);
          dot(acc[R + r][chain], radius_hi, _mm512_permutexvar_epi8(angle, L::load_bytes(table[1][r][q])));
          dot(acc[2 * R + r][chain], radius_lo, hi);
        });
      });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const auto total = [&](int x) KVQ_LAMBDA {
          return CHAINS == 2 ? _mm512_add_epi32(acc[x][0], acc[x][1]) : acc[x][0];
        };
        // in units of T_lo r_hi; r_lo T_hi is 256 / 256 of one
        const Reals sum = to_reals(join(total(r), add32(total(R + r), total(2 * R + r))));
        store(task.scores + (row + r) * BLOCK + column + 16 * half, sum * L::all(work.step[row + r]));
      });
    }
  }
};

}  // namespace integer
}  // namespace

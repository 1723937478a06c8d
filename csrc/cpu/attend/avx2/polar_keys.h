//     q . k_t = sum_p q_p . k_pt,    k_pt = r_pt (cos phi_pt, sin phi_pt)
//
// PolarQuant's keys (formats/methods/polar.py), unpacked to 16-bit integers once per slab for all rows. 4-bit angles with 4- or
// 2-bit radii are read as they are stored; polar_codes.h joins others to nibbles.
//
// A page has 16 cosines, 16 sines and up to 16 radii per pair of channels. They are looked up for 32 tokens at a time
// (two byte shuffles make 16 bits) and multiplied by vpmulhrsw. vpmaddwd then multiplies one pair of WIDTH tokens: as
// many channels per instruction as the other formats take with two bytes per factor, and without a table per query row.
// What is done once per page or per query, and turning the codes around, works on 8 lanes for both vector sizes.
//
// A pair's radii are in units of its largest radius / LONGEST, and this unit goes into the query. Eight pairs fit into
// 32 bits: |sum of 8 q_p . k_p| <= 8 * LONGEST * LARGEST < 2^31. In a damaged page sums may wrap.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"
#include "../integer/polar_codes.h"
#include "trigonometry.h"

namespace {
namespace integer {

using namespace kvq;

template <int D, int RADIUS_BITS>
struct PolarKeys {
  static constexpr int PAIRS = D / 2, CODES = 16, RUN = 8;
  static constexpr float LONGEST = 8191.0f, LARGEST = 32000.0f;
  static_assert(8.0 * (LONGEST + 2) * (LARGEST + 2) < 2147483647.0);

  struct Work {
    alignas(64) uint8_t cosine[PAIRS * L::TABLE_BYTES], sine[PAIRS * L::TABLE_BYTES], radius[PAIRS * L::TABLE_BYTES];
    alignas(64) uint8_t angle_codes[PAIRS][32], radius_codes[PAIRS][32];        // of a slab, in the order of turn_bytes
    alignas(64) int16_t key[PAIRS][SLAB][2];
    alignas(64) int16_t q[ROWS][PAIRS][2];
    alignas(64) float x[ROWS][PAIRS], y[ROWS][PAIRS], unit[PAIRS];
    alignas(64) uint8_t codes[PAIRS * SLAB];
    float step[ROWS];
    PolarGrid grid;
  };

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }

  static void begin(Task& task) {
    Work& work = *reinterpret_cast<Work*>(task.key_work);
    work.grid = PolarGrid(*task.layout, 0, 1);
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
    const Layout& l = *task.layout;
    if (task.prepared != slab.page) {
      read_grid(l, slab.page, work);
      for (int row = 0; row < task.rows; ++row) round_query(row, work);
    }
    task.prepared = slab.page;
    if constexpr (RADIUS_BITS == 4) {
      if constexpr (JOINED) join_codes<PAIRS>(l, slab, work.codes);
      spread<8>(JOINED ? work.codes : slab.data + l.k_polar, [&](int p, __m256i codes) KVQ_LAMBDA {
        const __m256i nibble = _mm256_set1_epi8(15);
        store_bytes(work.angle_codes[p], _mm256_and_si256(codes, nibble));
        store_bytes(work.radius_codes[p], _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
      });
    } else {
      const auto into = [](uint8_t (*to)[32]) { return [to](int p, __m256i codes) { store_bytes(to[p], codes); }; };
      spread<4>(slab.data + l.k_angle, into(work.angle_codes));
      spread<2>(slab.data + l.k_radius, into(work.radius_codes));
    }
    look_up(work, task.prefetch);
    row_tiles(task.rows, [&](auto r, int row) { tile<decltype(r)::value>(task, column, row, work); });
  }

  // The page's 16 angles and its radii; 8 pairs side by side, turned from one angle to the next.
  static __attribute__((noinline)) void read_grid(const Layout& l, const uint8_t* page, Work& work) {
    const __m256 one = _mm256_set1_ps(32767.0f);
    for (int p = 0; p < PAIRS; p += 8) {
      const auto field = [&](int64_t at) { return Lanes8::load_halves(page + at + 2 * p); };
      const PolarCells<__m256> cells(l, work.grid, field);
      const __m256 longest = _mm256_max_ps(cells.last, _mm256_set1_ps(1e-30f));
      const __m256 factor = _mm256_div_ps(_mm256_set1_ps(LONGEST), longest);
      _mm256_storeu_ps(work.unit + p, _mm256_mul_ps(longest, _mm256_set1_ps(1 / LONGEST)));
      __m256 s, c, turn_s, turn_c, sines[CODES];
      sine_cosine(cells.angle, s, c);
      sine_cosine(cells.turn, turn_s, turn_c);
      by_pair(work.cosine, p, [&](int a) {
        const __m256 cosine = c;
        sines[a] = s;
        c = _mm256_fmsub_ps(cosine, turn_c, _mm256_mul_ps(s, turn_s));
        s = _mm256_fmadd_ps(cosine, turn_s, _mm256_mul_ps(s, turn_c));
        return _mm256_mul_ps(cosine, one);
      });
      by_pair(work.sine, p, [&](int a) { return _mm256_mul_ps(sines[a], one); });
      by_pair(work.radius, p, [&](int i) {
        return _mm256_mul_ps(_mm256_fmadd_ps(cells.step, _mm256_set1_ps(float(i)), cells.first), factor);
      });
    }
  }

  // value(code) of 8 pairs from `first` on, for 16 codes in order, as 16-bit integers into the pairs' tables.
  template <class Value>
  KVQ_INLINE static void by_pair(uint8_t* tables, int first, Value value) {
    __m256i two[8];  // codes 2 i and 2 i + 1 of 8 pairs
    unroll<8>([&](auto i) KVQ_LAMBDA {
      const __m256i even = _mm256_cvtps_epi32(value(2 * i)), odd = _mm256_cvtps_epi32(value(2 * i + 1));
      two[i] = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
    });
    __m256i a[8], b[8];
    unroll<4>([&](auto i) KVQ_LAMBDA {
      a[2 * i] = _mm256_unpacklo_epi32(two[2 * i], two[2 * i + 1]);      // pairs 0 1 | 4 5
      a[2 * i + 1] = _mm256_unpackhi_epi32(two[2 * i], two[2 * i + 1]);  // pairs 2 3 | 6 7
    });
    unroll<2>([&](auto i) KVQ_LAMBDA {
      unroll<2>([&](auto j) KVQ_LAMBDA {
        b[4 * i + 2 * j] = _mm256_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
        b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      });
    });
    unroll<4>([&](auto i) KVQ_LAMBDA {
      split(tables, first + i, _mm256_permute2x128_si256(b[i], b[4 + i], 0x20));
      split(tables, first + 4 + i, _mm256_permute2x128_si256(b[i], b[4 + i], 0x31));
    });
  }

  KVQ_INLINE static void split(uint8_t* tables, int pair, __m256i v) {
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_srli_epi16(v, 8));
    const __m256i parts = _mm256_permute4x64_epi64(bytes, 0xD8);
    L::put_table(tables, pair, _mm256_castsi256_si128(parts), _mm256_extracti128_si256(parts, 1));
  }

  static __attribute__((noinline)) void round_query(int row, Work& work) {
    __m256 largest = _mm256_setzero_ps();
    for (int p = 0; p < PAIRS; p += 8) {
      const __m256 x = _mm256_loadu_ps(work.x[row] + p), y = _mm256_loadu_ps(work.y[row] + p);
      const __m256 length = _mm256_sqrt_ps(_mm256_fmadd_ps(x, x, _mm256_mul_ps(y, y)));
      largest = _mm256_max_ps(largest, _mm256_mul_ps(length, _mm256_loadu_ps(work.unit + p)));
    }
    const float top = reduce<Max>(largest) + 1e-30f;
    work.step[row] = top / LARGEST;
    for (int p = 0; p < PAIRS; p += 8) {
      const __m256 factor = _mm256_mul_ps(_mm256_loadu_ps(work.unit + p), _mm256_set1_ps(LARGEST / top));
      const __m256i x = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(work.x[row] + p), factor));
      const __m256i y = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(work.y[row] + p), factor));
      store_bytes(work.q[row][p], _mm256_blend_epi16(x, _mm256_slli_epi32(y, 16), 0xAA));
    }
  }

  // put(pair, its codes of 32 tokens in the order of turn_bytes)
  template <int BITS, class Put>
  KVQ_INLINE static void spread(const uint8_t* codes, Put put) {
    constexpr int PLANES = 8 / BITS, STRIDE = PAIRS / PLANES;
    for (int word = 0; word < STRIDE / 4; ++word) {
      __m256i pair[4];
      turn_bytes(codes + word * 128, pair);
      unroll<4>([&](auto j) KVQ_LAMBDA {
        if constexpr (BITS == 8) {
          put(4 * word + j, pair[j]);
        } else {
          const __m256i mask = _mm256_set1_epi8((1 << BITS) - 1);
          unroll<PLANES>([&](auto plane) KVQ_LAMBDA {
            put(plane * STRIDE + 4 * word + j, _mm256_and_si256(_mm256_srli_epi16(pair[j], BITS * plane), mask));
          });
        }
      });
    }
  }

  // key[pair][token] = radius (cos, sin); AT_ONCE pairs of 32 tokens fill a vector of bytes
  static __attribute__((noinline)) void look_up(Work& work, Prefetch& prefetch) {
    constexpr int AT_ONCE = WIDTH / 8;
    for (int p = 0; p < PAIRS; p += AT_ONCE) {
      if (p % 2 == 0) prefetch.lines<1>();
      const Ints angle = L::load_bytes(work.angle_codes[p]), radius = L::load_bytes(work.radius_codes[p]);
      const auto find = [p](const uint8_t* tables, Ints codes, Ints(&v)[2]) KVQ_LAMBDA {
        const Ints lo = shuffle(L::low_table(tables, p), codes), hi = shuffle(L::high_table(tables, p), codes);
        v[0] = interleave_low8(lo, hi);
        v[1] = interleave_high8(lo, hi);
      };
      Ints c[2], s[2], r[2];
      find(work.cosine, angle, c);
      find(work.sine, angle, s);
      find(work.radius, radius, r);
      unroll<2>([&](auto i) KVQ_LAMBDA {
        const Ints x = multiply_high(r[i], c[i]), y = multiply_high(r[i], s[i]);
        store_apart(work.key[p][16 * i], sizeof work.key[0], interleave_low16(x, y));
        store_apart(work.key[p][16 * i + 8], sizeof work.key[0], interleave_high16(x, y));
      });
    }
  }

  template <int R>
  static __attribute__((noinline)) void tile(Task& task, int column, int row, const Work& work) {
    constexpr int T = VECTORS<R>;
    for (int token = 0; token < SLAB; token += WIDTH * T) {
      Reals scores[R][T];
      clear(scores);
      for (int first = 0; first < PAIRS; first += RUN) {
        Ints acc[R][T];
        clear(acc);
        unroll<RUN>([&](auto i) KVQ_LAMBDA {
          Ints k[T];
          unroll<T>([&](auto t) KVQ_LAMBDA { k[t] = L::load_bytes(work.key[first + i][token + WIDTH * t]); });
          unroll<R>([&](auto r) KVQ_LAMBDA {
            const Ints q = quad(work.q[row + r][first + i]);
            unroll<T>([&](auto t) KVQ_LAMBDA { sum32(acc[r][t], multiply_pairs(k[t], q)); });
          });
        });
        unroll<R>([&](auto r) KVQ_LAMBDA {
          unroll<T>([&](auto t) KVQ_LAMBDA { scores[r][t] = scores[r][t] + to_reals(acc[r][t]); });
        });
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        const Reals step = L::all(work.step[row + r]);
        unroll<T>([&](auto t) KVQ_LAMBDA {
          store(task.scores + (row + r) * BLOCK + column + token + WIDTH * t, scores[r][t] * step);
        });
      });
    }
  }
};

}  // namespace integer
}  // namespace

//     sum_t p_t v_tc = sum_t (p_t scale_tg) code_tc + sum_t p_t zero_tg          g: the group of channel c
//
// Values per token (formats/methods/values.py): one scale and one zero per token and group of channels. The scales are
// multiplied into the softmax weights once per block, which are then rounded to fixed point per row and group. Up to 32
// channels are taken at a time; they share their weights because groups are multiples of 32.
//
// This kernel has a twin in ../vnni. As one source, g++ 12 spilled the sums of the VNNI kernel: squat2 rose from 0.406
// to 0.416 instructions per cached element with 4 query heads, and from 0.197 to 0.214 with one.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

// What does not depend on whether a token's zero is stored.
template <int BITS>
struct TokenProducts {
  static constexpr int LOW = BITS == 3 ? 2 : BITS;  // bits in v_codes; a third one is in v_high
  static constexpr int GROUPS = LARGEST_HEAD / 32;
  static constexpr int RUN = SUMS<BITS> / (SLAB / 4) < BLOCK_SLABS ? SUMS<BITS> / (SLAB / 4) : BLOCK_SLABS;
  static_assert(RUN >= 1);  // slabs between two widenings

  struct Work {
    alignas(64) float widest[BLOCK];     // the largest scale of a token
    alignas(64) float scaled[4][BLOCK];  // p in fixed-point units, of a tile's rows
    alignas(64) int8_t weights[PARTS][4][GROUPS][BLOCK];
    alignas(16) float offset[GROUPS][4];
    float step[4];
    alignas(64) L::Attended attended[BLOCK / WIDTH];
  };

  // WIDTH T channels from c on, R rows; stride: channels of a plane
  template <int R, class Stride>
  static __attribute__((noinline)) void multiply(const Layout& l, Stride stride, const Slab* slabs, int count, unsigned c,
                                                 Work& work, Prefetch& prefetch, float* out) {
    constexpr int X = R * PARTS, T = VECTORS<X>;
    const int group = int(c / l.group);
    const Ints mask = L::all8((1 << LOW) - 1);
    const auto high_stride = half_of(stride);  // of three bits
    int64_t at[T], high_at[T];
    Ints shift[T], high_shift[T], sums[R][T];
    unroll<T>([&](auto t) KVQ_LAMBDA {
      at[t] = l.v_codes + (c + WIDTH * t) % stride * 4;
      shift[t] = planes(c + WIDTH * t, stride, LOW);
      if constexpr (BITS == 3) {
        high_at[t] = l.v_high + (c + WIDTH * t) % high_stride * 4;
        high_shift[t] = planes(c + WIDTH * t, high_stride, 1);
      }
      unroll<R>([&](auto r) KVQ_LAMBDA { sums[r][t] = Ints{}; });
    });
    for (int first = 0; first < count; first += RUN) {
      Ints acc[X][T];
      clear(acc);
      for (int s = first; s < first + RUN && s < count; ++s) {
        const int8_t* weights = work.weights[0][0][group] + s * SLAB;
        const char* ahead = prefetch.take<2>();  // at once: a branch amid the sums would move them about
#pragma GCC unroll 8
        for (int e = 0; e < SLAB / 4; ++e) {
          Ints code[T];
          unroll<T>([&](auto t) KVQ_LAMBDA {
            const Ints bytes = load_words(slabs[s].data + at[t] + e * stride * 4, c + WIDTH * t, stride);
            code[t] = shift_right(bytes, shift[t]) & mask;
            if constexpr (BITS == 3) {
              const Ints high = load_words(slabs[s].data + high_at[t] + e * high_stride * 4, c + WIDTH * t, high_stride);
              code[t] = with_third_bit(code[t], high, high_shift[t]);
            }
          });
          if (e % 4 == 0) __builtin_prefetch(ahead + e / 4 * 64, 0, 3);
          unroll<X>([&](auto x) KVQ_LAMBDA {
            constexpr int part = x / R, r = x % R;
            const Ints b = quad(weights + (part * 4 + r) * GROUPS * BLOCK + e * 4);
            unroll<T>([&](auto t) KVQ_LAMBDA { dot(acc[x][t], code[t], b); });
          });
        }
      }
      unroll<R>([&](auto r) KVQ_LAMBDA {
        unroll<T>([&](auto t) KVQ_LAMBDA {
          sums[r][t] = add32(sums[r][t], join(acc[r][t], acc[R + r][t]));
        });
      });
    }
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const Reals step = L::all(work.step[r]), offset = L::all(work.offset[group][r]);
      unroll<T>([&](auto t) KVQ_LAMBDA {
        float* to = out + r * l.d + WIDTH * t;
        const Reals sum = L::load(to) + offset;
        store(to, fmadd(to_reals(sums[r][t]), step, sum));
      });
    });
  }
};

template <int BITS, bool SEARCHED = false>
struct TokenValues : TokenProducts<BITS> {
  using Products = TokenProducts<BITS>;
  using typename Products::Work;
  static constexpr float MIDDLE = -0.5f * ((1 << BITS) - 1);  // of the codes

  static size_t work_bytes(const Layout&) { return align64(sizeof(Work)); }
  static int groups_of(const Layout& l) { return int((l.d + l.group - 1) / l.group); }

  static void add(Task& task, const Slab* slabs, int count) {
    Work& work = *reinterpret_cast<Work*>(task.value_work);
    const Layout& l = *task.layout;
    for (int s = 0; s < count; ++s)
      unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA {
        work.attended[s * PER_SLAB + v] = L::attended(slabs[s].low, slabs[s].high, WIDTH * v);
      });
    const int groups = groups_of(l);  // a division, and what follows writes bytes, which may be anything
    find_widest(l, slabs, count, groups, work);
    row_tiles(task.rows, [&](auto r, int row) {
      constexpr int R = decltype(r)::value;
      scale_weights<R>(task, row, count, work);
      for (int g = 0; g < groups; ++g) weigh<R>(l, slabs, count, g, work);
      by_stride<Products::LOW>(l.d, [&](auto stride) KVQ_LAMBDA {
        for (int c = 0; c < l.d; c += WIDTH * VECTORS<R * PARTS>)
          Products::template multiply<R>(l, stride, slabs, count, c, work, task.prefetch, task.out + row * l.d + c);
      });
    });
  }

  // The parameters at `p` of vector v of slab s; 0 where unattended: their weight is 0, but 0 times NaN would not be.
  KVQ_INLINE static Reals parameters(const uint8_t* p, int s, int v, const Work& work) {
    return L::load_halves(p + 2 * WIDTH * v, work.attended[s * PER_SLAB + v]);
  }

  // The scales of group g in vector v of slab s; searched ones are bytes.
  KVQ_INLINE static Reals scales(const Layout& l, const Slab* slabs, int s, int v, int g, const Work& work) {
    const uint8_t* p = slabs[s].data + l.v_scale;
    if (SEARCHED)
      return L::only(work.attended[s * PER_SLAB + v], L::load_scales(p + WIDTH * v));
    return parameters(p + g * SLAB * 2, s, v, work);
  }

  static void find_widest(const Layout& l, const Slab* slabs, int count, int groups, Work& work) {
    for (int s = 0; s < count; ++s) {
      Reals widest[PER_SLAB];
      unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA { widest[v] = scales(l, slabs, s, v, 0, work); });
      for (int g = 1; g < groups; ++g)
        unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA { widest[v] = maximum(widest[v], scales(l, slabs, s, v, g, work)); });
      unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA { store(work.widest + s * SLAB + WIDTH * v, widest[v]); });
    }
  }

  // The fixed-point unit of a row follows its largest p * scale, not the largest scale: an outlier token that nobody
  // looks at must not cost the others their precision.
  template <int R>
  KVQ_INLINE static void scale_weights(const Task& task, int row, int count, Work& work) {
    const float* p = task.scores + row * BLOCK;
    Reals largest[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { largest[r] = Reals{}; });
    for (int t = 0; t < count * SLAB; t += WIDTH) {
      const Reals widest = L::load(work.widest + t);
      unroll<R>([&](auto r) KVQ_LAMBDA {
        largest[r] = maximum(largest[r], L::load(p + r * BLOCK + t) * widest);
      });
    }
    const __m128 top = _mm_max_ps(reduce4<Max>(largest), _mm_set1_ps(1e-30f));
    alignas(16) float factors[4];
    _mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(RANGE), top));
    const float unit = SEARCHED ? float(task.layout->value_step) : 1.0f;
    _mm_storeu_ps(work.step, _mm_mul_ps(top, _mm_set1_ps(unit / RANGE)));
    unroll<R>([&](auto r) KVQ_LAMBDA {
      const Reals factor = L::all(factors[r]);
      for (int t = 0; t < count * SLAB; t += WIDTH)
        store(work.scaled[r] + t, L::load(p + r * BLOCK + t) * factor);
    });
  }

  template <int R>
  KVQ_INLINE static void weigh(const Layout& l, const Slab* slabs, int count, int g, Work& work) {
    Reals zeros[4];
    unroll<4>([&](auto r) KVQ_LAMBDA { zeros[r] = Reals{}; });
    for (int s = 0; s < count; ++s) {
      const int t = s * SLAB;
      Reals scale[PER_SLAB], zero[PER_SLAB];
      unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA {
        scale[v] = scales(l, slabs, s, v, g, work);
        if constexpr (SEARCHED)
          zero[v] = scale[v] * L::all(MIDDLE);
        else
          zero[v] = parameters(slabs[s].data + l.v_zero + g * SLAB * 2, s, v, work);
      });
      unroll<R>([&](auto r) KVQ_LAMBDA {
        Reals x[PER_SLAB];
        unroll<PER_SLAB>([&](auto v) KVQ_LAMBDA {
          const Reals p = L::load(work.scaled[r] + t + WIDTH * v);
          zeros[r] = fmadd(p, zero[v], zeros[r]);
          x[v] = p * scale[v];
        });
        pack(x, work.weights[0][r][g] + t, work.weights[1][r][g] + t);
      });
    }
    _mm_store_ps(work.offset[g], _mm_mul_ps(reduce4<Add>(zeros), _mm_loadu_ps(work.step)));
  }
};

}  // namespace integer
}  // namespace

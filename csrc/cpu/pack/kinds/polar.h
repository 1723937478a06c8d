//     (x, y) = r (cos phi, sin phi)
//     angle code:  floor((phi - angle0) / angle_step)        radius code:  floor((r - radius0) / radius_step)
//
// PolarQuant's keys (formats/methods/polar.py): a whole page, as many pairs of channels as there are lanes at a time.
#pragma once

#include "affine.h"

namespace {
namespace float32 {

constexpr float TURN = 6.283185307179586f, PI = 3.14159265358979f;

// atan2 to about 2 units in the last place: atan on [0, tan(pi / 8)] by a polynomial, octants by symmetry.
inline Floats arc_tangent(Floats y, Floats x) {
  const Floats ax = absolute(x), ay = absolute(y);
  const Floats big = max(ax, ay), small = min(ax, ay);
  Floats t = small / (big > Floats{} ? big : splat(1.0f));
  const Ints upper = Ints(t > splat(0.41421356237f));
  t = upper ? (small - big) / (small + big) : t;
  const Floats s = t * t;
  Floats p = splat(8.05374449538e-2f);
  p = p * s - 1.38776856032e-1f;
  p = p * s + 1.99777106478e-1f;
  p = p * s - 3.33329491539e-1f;
  Floats a = p * s * t + t;
  a = upper ? a + 0.785398163397448f : a;
  a = ay > ax ? splat(1.57079632679490f) - a : a;
  a = bits_of(x) < 0 ? splat(PI) - a : a;
  return floats(bits_of(a) | (bits_of(y) & int32_t(0x80000000)));
}

// Batcher's odd-even merge sort of n rows (a power of two), each lane on its own.
inline void sort_rows(float* x, int64_t n) {
  for (int64_t p = 1; p < n; p *= 2)
    for (int64_t k = p; k >= 1; k /= 2)
      for (int64_t j = k % p; j + k < n; j += 2 * k)
        for (int64_t i = 0; i < k && i + j + k < n; ++i)
          if ((i + j) / (2 * p) == (i + j + k) / (2 * p)) {
            float *a = x + (i + j) * LANES, *b = a + k * LANES;
            const Floats u = load(a), v = load(b);
            store(a, min(u, v));
            store(b, max(u, v));
          }
}

inline int64_t power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// codes of angle and radius [N][d / 2] each; angles, radii [N][LANES]; sorted [2^k][LANES]
inline size_t polar_work_bytes(const Layout& l, int64_t tokens) {
  return align64(4 * size_t(tokens * l.d + LANES * (2 * tokens + power_of_two(tokens))));
}

inline Floats remainder_of_turn(Floats x) {  // of -2 turns < x < 2 turns, in [0, turn)
  const Floats turn = splat(TURN);
  Floats r = x >= turn ? x - turn : x;
  r = r <= -turn ? r + turn : r;
  return r < Floats{} ? r + turn : r;
}

struct PolarGrid {
  Floats angle0, angle_step, half_gap, radius0, radius_step;
};

inline PolarGrid polar_grid(const Layout& l, const float* angles, const float* radii, int64_t tokens, float* sorted) {
  PolarGrid g{};
  Floats low = load(radii), high = low;
  for (int64_t t = 1; t < tokens; ++t) {
    low = min(low, load(radii + t * LANES));
    high = max(high, load(radii + t * LANES));
  }
  if (l.paper) {
    g.radius_step = positive_half(high / splat(float((1 << l.radius_bits) - 1)));
    return g;
  }
  const int64_t n = power_of_two(tokens);
  std::memcpy(sorted, angles, 4 * size_t(tokens) * LANES);
  for (int64_t t = tokens; t < n; ++t) store(sorted + t * LANES, splat(1e30f));
  sort_rows(sorted, n);
  Floats first = load(sorted), gap = (first + TURN) - load(sorted + (tokens - 1) * LANES);
  for (int64_t t = 1; t < tokens; ++t) {
    const Floats here = load(sorted + t * LANES), width = here - load(sorted + (t - 1) * LANES);
    const Ints wider = Ints(width > gap);
    gap = wider ? width : gap;
    first = wider ? here : first;
  }
  g.angle0 = half(first);
  g.angle_step = positive_half((splat(TURN) - gap) / splat(float(1 << l.key_bits)));
  g.half_gap = gap / splat(2.0f);
  g.radius0 = half(low);
  g.radius_step = positive_half((high - low) / splat(float(1 << l.radius_bits)));
  return g;
}

// floor of 0 <= x < 2^22
inline Floats floor_positive(Floats x) {
  const Floats n = nearest(x);
  return n > x ? n - 1.0f : n;
}

// The angles of a slab, [32][pairs]. Three bits don't fill bytes: two go into one field, the third into its own plane.
inline void put_angles(const Layout& l, int32_t* angle, uint8_t* slab) {
  const int64_t pairs = l.d / 2;
  if (l.key_bits != 3) return put_key_codes(angle, pairs, int(l.key_bits), slab + l.k_angle);
  const int64_t padded = (pairs + SLAB - 1) / SLAB * SLAB;  // pairs whose bits are whole words
  int32_t high[SLAB * LARGEST_HEAD / 2] = {};
  for (int t = 0; t < SLAB; ++t)
    for (int64_t p = 0; p < pairs; ++p) {
      high[t * padded + p] = angle[t * pairs + p] >> 2;
      angle[t * pairs + p] &= 3;
    }
  put_key_codes(angle, pairs, 2, slab + l.k_angle);
  put_key_codes(high, padded, 1, slab + l.k_angle_high);
}

inline void pack_polar(const PackUnit& u) {
  const Layout& l = *u.layout;
  const int64_t pairs = l.d / 2, tokens = u.tokens;
  int32_t *angle = reinterpret_cast<int32_t*>(u.work), *radius = angle + tokens * pairs;
  float *angles = reinterpret_cast<float*>(radius + tokens * pairs), *radii = angles + tokens * LANES,
        *sorted = radii + tokens * LANES;
  const int32_t *xs = u.constants->pairs, *ys = xs + pairs;
  const Floats angle_top = splat(float((1 << l.key_bits) - 1)), radius_top = splat(float((1 << l.radius_bits) - 1));
  for (int64_t p = 0; p < pairs; p += LANES) {
    for (int64_t t = 0; t < tokens; ++t) {
      const float* k = u.key + t * l.d;
      float x[LANES], y[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = k[xs[p + i]], y[i] = k[ys[p + i]];
      const Floats a = load(x), b = load(y);
      store(angles + t * LANES, arc_tangent(b, a));
      float r[LANES];
      for (int i = 0; i < LANES; ++i) r[i] = float(__builtin_sqrt(double(x[i]) * x[i] + double(y[i]) * y[i]));
      std::memcpy(radii + t * LANES, r, sizeof r);
    }
    const PolarGrid g = polar_grid(l, angles, radii, tokens, sorted);
    uint8_t* page = u.record + 2 * p;
    store_halves(page + l.k_radius_step, g.radius_step);
    if (!l.paper) {
      store_halves(page + l.k_angle0, g.angle0);
      store_halves(page + l.k_angle_step, g.angle_step);
      store_halves(page + l.k_radius0, g.radius0);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const Floats phi = load(angles + t * LANES), r = load(radii + t * LANES);
      Ints a, b;
      if (l.paper) {
        a = to_ints(nearest(phi / splat(TURN / float(1 << l.key_bits)))) & ((1 << l.key_bits) - 1);
        b = to_ints(nearest(min(r / g.radius_step, radius_top)));
      } else {
        const Floats rise = remainder_of_turn((phi - g.angle0) + g.half_gap) - g.half_gap;
        a = to_ints(floor_positive(min(max(rise / g.angle_step, Floats{}), angle_top)));
        b = to_ints(floor_positive(min(max((r - g.radius0) / g.radius_step, Floats{}), radius_top)));
      }
      std::memcpy(angle + t * pairs + p, &a, sizeof a);
      std::memcpy(radius + t * pairs + p, &b, sizeof b);
    }
  }
  for (int64_t t = 0; t < tokens; t += SLAB) {
    uint8_t* slab = u.slabs + t / SLAB * l.slab_bytes;
    if (l.key_bits == 4 && l.radius_bits == 4) {
      for (int64_t i = t * pairs; i < (t + SLAB) * pairs; ++i) angle[i] |= radius[i] << 4;
      put_key_codes(angle + t * pairs, pairs, 8, slab + l.k_polar);
    } else {
      put_angles(l, angle + t * pairs, slab);
      put_key_codes(radius + t * pairs, pairs, int(l.radius_bits), slab + l.k_radius);
    }
  }
}

}  // namespace float32
}  // namespace

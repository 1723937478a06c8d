//     code = round(clamp((x - zero) / scale, 0, 2^bits - 1))        x ~ zero + code scale
//
// Affine codes: SQuat's and KIVI's keys (formats/methods/squat.py), values per token (formats/methods/values.py), and the arithmetic of
// formats/parts/quant.py that all packers share. `top` is 2^bits - 1 of each lane's group.
#pragma once

#include "../../hadamard.h"
#include "../../half.h"
#include "../../scratch.h"
#include "../../dispatch/pack_kernels.h"
#include "../../isa/matrix.h"

namespace {
namespace float32 {

using namespace kvq;

constexpr float TINY = 0x1p-24f;  // as formats/parts/quant.py

// float16 with infinities and NaN, which a raw token may hold
inline float half_exactly(uint16_t h) {
  const float x = half_to_float(h);
  return (h & 0x7c00) == 0x7c00 ? bits_to_float(uint32_t(h & 0x8000) << 16 | 0x7f800000u | uint32_t(h & 0x3ff) << 13)
                                : x;
}

inline Floats floats(Ints x) {
  Floats f;
  std::memcpy(&f, &x, sizeof x);
  return f;
}

inline Ints bits_of(Floats x) {
  Ints i;
  std::memcpy(&i, &x, sizeof x);
  return i;
}

inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Floats absolute(Floats x) { return floats(bits_of(x) & 0x7fffffff); }

// x as float16 stores it, in the low bits of each lane: float_to_half of half.h, lane by lane
inline Ints half_bits(Floats x) {
  const Floats magnitude = min(absolute(x), splat(65504.0f));
  const Ints bits = bits_of(magnitude);
  const Ints small = bits_of(magnitude + 0.5f) - 0x3f000000;
  const Ints normal = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
  return (bits < 0x38800000 ? small : normal) | (bits_of(x) >> 16 & 0x8000);
}

inline Floats from_half_bits(Ints h) {
  const Floats magnitude = floats((h & 0x7fff) << 13) * splat(0x1p112f);
  return floats(bits_of(magnitude) | (h & 0x8000) << 16);
}

inline Floats half(Floats x) { return from_half_bits(half_bits(x)); }
inline Floats positive_half(Floats x) { return max(half(x), splat(TINY)); }

inline void store_halves(uint8_t* to, Floats x) {
  const Ints h = half_bits(x);
  uint16_t out[LANES];
  for (int i = 0; i < LANES; ++i) out[i] = uint16_t(h[i]);
  std::memcpy(to, out, sizeof out);
}

// Nearest even integer of |x| < 2^22, as a float.
inline Floats nearest(Floats x) {
  const Floats magic = splat(12582912.0f);
  return (x + magic) - magic;
}

inline Ints to_ints(Floats x) { return bits_of(x + splat(12582912.0f)) - 0x4b400000; }

inline Floats affine_code(Floats x, Floats scale, Floats zero, Floats top) {
  return nearest(max(min((x - zero) / scale, top), Floats{}));
}

// The residual of x after coding with one scale and zero: its sum of squares.
inline Floats squared_error(const float* x, int64_t n, int64_t stride, Floats scale, Floats zero, Floats top) {
  Floats sum{};
  for (int64_t i = 0; i < n; ++i) {
    const Floats v = load(x + i * stride), e = (zero + affine_code(v, scale, zero, top) * scale) - v;
    sum += e * e;
  }
  return sum;
}

struct Affine {
  Floats scale, zero;
};

// `fitted_parameters` of formats/parts/quant.py for LANES groups; element i of a group lies at x[i * stride].
inline Affine fitted(const float* x, int64_t n, int64_t stride, Floats lo, Floats hi, Floats top) {
  const Floats count = splat(float(n)), part = Ints(top == splat(3.0f)) ? splat(0.8f) : splat(1.0f);
  Floats mean{};
  for (int64_t i = 0; i < n; ++i) mean += load(x + i * stride);
  mean = mean / count;
  Floats scale = positive_half((hi - lo) * part / top), zero = half(lo + (hi - lo) * ((1.0f - part) / 2.0f));
  for (int round = 0; round < 3; ++round) {
    Floats total{}, squares{}, product{};
    for (int64_t i = 0; i < n; ++i) {
      const Floats v = load(x + i * stride), code = affine_code(v, scale, zero, top);
      total += code;
      squares += code * code;
      product += code * (v - mean);
    }
    const Floats spread = squares - total * total / count;
    const Floats slope = positive_half(product / max(spread, splat(TINY)));
    const Ints moves = Ints(spread > 0.0f);
    zero = moves ? half(mean - slope * total / count) : zero;
    scale = moves ? slope : scale;
  }
  const Floats whole = positive_half((hi - lo) / top), low = half(lo);
  const Ints better = Ints(squared_error(x, n, stride, scale, zero, top) < squared_error(x, n, stride, whole, low, top));
  return {better ? scale : whole, better ? zero : low};
}

inline Affine parameters(const float* x, int64_t n, int64_t stride, Floats lo, Floats hi, Floats top, bool fit) {
  if (fit) return fitted(x, n, stride, lo, hi, top);
  return {positive_half((hi - lo) / top), half(lo)};
}

// Codes [32][n] of keys to bytes (formats/parts/planes.py).
inline void put_key_codes(const int32_t* codes, int64_t n, int bits, uint8_t* to) {
  const int planes = 8 / bits;
  const int64_t stride = n / planes;
  uint8_t bytes[2048];
  for (int t = 0; t < SLAB; ++t) {
    const int32_t* row = codes + t * n;
    for (int64_t i = 0; i < stride; ++i) {
      int32_t b = row[i];
      for (int p = 1; p < planes; ++p) b |= row[i + p * stride] << (bits * p);
      bytes[i] = uint8_t(b);
    }
    for (int64_t quad = 0; quad < stride / 4; ++quad) std::memcpy(to + (quad * SLAB + t) * 4, bytes + 4 * quad, 4);
  }
}

// The same of values.
inline void put_value_codes(const int32_t* codes, int64_t n, int bits, uint8_t* to) {
  const int planes = 8 / bits;
  const int64_t stride = n / planes;
  int32_t words[LARGEST_HEAD];
  for (int quad = 0; quad < SLAB / 4; ++quad) {
    for (int64_t i = 0; i < stride; ++i) words[i] = 0;
    for (int j = 0; j < 4; ++j)
      for (int p = 0; p < planes; ++p) {
        const int32_t* row = codes + (4 * quad + j) * n + p * stride;
        const int shift = 8 * j + bits * p;
        for (int64_t i = 0; i < stride; ++i) words[i] |= row[i] << shift;
      }
    std::memcpy(to + quad * stride * 4, words, size_t(stride) * 4);
  }
}

// For keys: codes [32][d], corrected keys and their errors [32][d], and z [32][MAX_RANK]; for values: codes, a group's
// channels and the rotated ones.
inline size_t scalar_work_bytes(const Layout& l) {
  return align64(4 * size_t(SLAB) * (3 * l.d + MAX_RANK));
}

// Channels [first, last) of 32 tokens, [32][stride].
struct Channels {
  const float* x;
  int64_t stride, first, last;
};

// What they are quantized to: float16 parameters, codes [32][stride], and, unless null, what is lost to `original`.
struct Quantized {
  uint8_t *scale, *zero;
  int32_t* codes;
  float* error;
  const float* original;
};

// Per channel over 32 tokens; the top of channel c's codes is tops(c).
template <class Tops>
inline void channel_codes(const Channels& channels, Tops tops, bool fit, const Quantized& to) {
  const auto [x, stride, first, last] = channels;
  const auto [scale, zero, codes, error, original] = to;
  for (int64_t c = first; c < last; c += LANES) {
    const Floats top = tops(c);
    Floats lo = load(x + c), hi = lo;
    for (int t = 1; t < SLAB; ++t) {
      const Floats v = load(x + t * stride + c);
      lo = min(lo, v);
      hi = max(hi, v);
    }
    const auto [s, z] = parameters(x + c, SLAB, stride, lo, hi, top, fit);
    store_halves(scale + 2 * c, s);
    store_halves(zero + 2 * c, z);
    for (int t = 0; t < SLAB; ++t) {
      const Floats q = affine_code(load(x + t * stride + c), s, z, top);
      const Ints code = to_ints(q);
      std::memcpy(codes + t * stride + c, &code, sizeof code);
      if (error) store(error + t * stride + c, (z + q * s) - load(original + t * stride + c));
    }
  }
}

// All channels of a unit: parameters to their fields, codes [32][d] to the start of `work`; the space after these is
// free again. With a state the recursion of formats/methods/squat.py: x_t = k_t - pull_t^T z, z += U_t (y_t - k_t). The state's
// last row is the noise.
template <class Tops>
inline int32_t* quantize_channels(const PackUnit& u, Tops tops) {
  const Layout& l = *u.layout;
  const int64_t d = l.d, block = u.pull ? l.squat_block : d;
  const int rank = int(u.state_rows) - 1;
  int32_t* codes = reinterpret_cast<int32_t*>(u.work);
  float *x = reinterpret_cast<float*>(codes + SLAB * d), *error = x + SLAB * d, *z = error + SLAB * d;
  uint8_t *scale = u.slabs + l.k_scale, *zero = u.slabs + l.k_zero;
  if (u.pull) std::memset(z, 0, 4 * SLAB * MAX_RANK);
  for (int64_t start = 0; start < d; start += block) {
    const int64_t end = start + block < d ? start + block : d;
    const float* from = u.key;
    if (start) {
      for (int t = 0; t < SLAB; ++t)
        for (int64_t c = start; c < end; c += LANES) {
          Floats sum{};
          for (int r = 0; r < rank; ++r) sum += splat(z[t * MAX_RANK + r]) * load(u.pull + r * d + c);
          const Floats moved = load(u.key + t * d + c) - sum;
          store(x + t * d + c, max(min(moved, splat(LIMIT)), splat(-LIMIT)));
        }
      from = x;
    }
    const bool last = end == d;
    channel_codes({from, d, start, end}, tops, l.key_fitted, {scale, zero, codes, last ? nullptr : error, u.key});
    if (last) break;
    for (int t = 0; t < SLAB; ++t)
      for (int r = 0; r < rank; ++r) {
        Floats dot{};
        for (int64_t c = start; c < end; c += LANES) dot += load(error + t * d + c) * load(u.state + r * d + c);
        z[t * MAX_RANK + r] += sum(dot);
      }
  }
  return codes;
}

inline void pack_channel(const PackUnit& u) {
  const Layout& l = *u.layout;
  const Floats top = splat(float((1 << l.key_bits) - 1));
  const int32_t* codes = quantize_channels(u, [top](int64_t) { return top; });
  put_key_codes(codes, l.d, int(l.key_bits), u.slabs + l.k_codes);
}

inline float smallest(Floats v) {
  float m = v[0];
  for (int i = 1; i < LANES; ++i) m = v[i] < m ? v[i] : m;
  return m;
}

// v H / sqrt(b) of the tokens of a slab, [32][d]; H itself also has the factor 1 / sqrt(b).
inline void rotate_values(const float* value, int64_t d, float* to) {
  std::memcpy(to, value, 4 * size_t(SLAB * d));
  const Floats part = splat(1.0f / float(hadamard_block(d)));
  for (int t = 0; t < SLAB; ++t) {
    float* row = to + t * d;
    hadamard(row, d);
    for (int64_t c = 0; c < d; c += LANES) store(row + c, load(row + c) * part);
  }
}

inline void pack_token_values(const Layout& l, const float* value, uint8_t* slab, char* work) {
  int32_t* codes = reinterpret_cast<int32_t*>(work);
  const Floats top = splat(float((1 << l.value_bits) - 1));
  const int64_t groups = (l.d + l.group - 1) / l.group;
  float lo[SLAB], hi[SLAB];
  float* by_token = reinterpret_cast<float*>(codes + SLAB * l.d);  // a group's channels [group][32]
  if (l.value_rotated) {
    float* rotated = by_token + SLAB * l.d;
    rotate_values(value, l.d, rotated);
    value = rotated;
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * l.group, last = first + l.group < l.d ? first + l.group : l.d;
    for (int t = 0; t < SLAB; ++t) {
      const float* x = value + t * l.d;
      Floats low = load(x + first), high = low;
      for (int64_t c = first + LANES; c < last; c += LANES) {
        low = min(low, load(x + c));
        high = max(high, load(x + c));
      }
      lo[t] = smallest(low);
      hi[t] = largest(high);
    }
    if (l.value_fitted)
      for (int64_t c = first; c < last; ++c)
        for (int t = 0; t < SLAB; ++t) by_token[(c - first) * SLAB + t] = value[t * l.d + c];
    for (int t = 0; t < SLAB; t += LANES) {
      const auto [s, z] = parameters(by_token + t, last - first, SLAB, load(lo + t), load(hi + t), top, l.value_fitted);
      store_halves(slab + l.v_scale + 2 * (g * SLAB + t), s);
      store_halves(slab + l.v_zero + 2 * (g * SLAB + t), z);
      store(hi + t, s);
      store(lo + t, z);
    }
    for (int t = 0; t < SLAB; ++t)
      for (int64_t c = first; c < last; c += LANES) {
        const Ints code = to_ints(affine_code(load(value + t * l.d + c), splat(hi[t]), splat(lo[t]), top));
        std::memcpy(codes + t * l.d + c, &code, sizeof code);
      }
  }
  put_value_codes(codes, l.d, int(l.value_bits), slab + l.v_codes);
}

}  // namespace float32
}  // namespace

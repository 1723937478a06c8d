// Packed slabs as float32: k[channel][token] and v[token][channel] of every format, whatever its options.
#pragma once

#include "../boosted.h"
#include "../half.h"
#include "../dispatch/attend_kernels.h"
#include "../isa/vectors.h"
#include "kinds/turning.h"

namespace {
namespace float32 {

using namespace kvq;

inline uint32_t word(const uint8_t* codes, int index) {
  uint32_t w;
  std::memcpy(&w, codes + 4 * index, 4);
  return w;
}

inline Ints load_ints(const void* from) {
  Ints x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// Calls put(channel, first token, codes of LANES tokens) for n channels of plane-quad key codes.
template <class Put>
inline void unpack_key_codes(const uint8_t* codes, int n, int bits, Put put) {
  const int planes = 8 / bits, stride = n / planes, mask = (1 << bits) - 1;
  for (int quad = 0; quad < stride / 4; ++quad)
    for (int t = 0; t < SLAB; t += LANES) {
      const Ints w = load_ints(codes + 4 * (quad * SLAB + t));
      for (int plane = 0; plane < planes; ++plane)
        for (int j = 0; j < 4; ++j) put(plane * stride + 4 * quad + j, t, (w >> (8 * j + bits * plane)) & mask);
    }
}

inline void read_halves(const uint8_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) {
    uint16_t h;
    std::memcpy(&h, from + 2 * i, 2);
    to[i] = half_to_float(h);
  }
}

// The scales of a slab's tokens (formats/parts/scales.py).
inline void read_scales(const uint8_t* from, float* to) {
  for (int t = 0; t < SLAB; ++t) to[t] = half_to_float(uint16_t(from[t] << SCALE_SHIFT));
}

inline void read_raw(const uint8_t* from, Dtype dtype, int count, float* to) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, from, 4 * size_t(count));
  } else if (dtype == Dtype::f16) {
    read_halves(from, count, to);
  } else {
    for (int i = 0; i < count; ++i) {
      uint16_t b;
      std::memcpy(&b, from + 2 * i, 2);
      to[i] = bfloat_to_float(b);
    }
  }
}

// InnerQ's groups of 32 elements: k = (code + (sign ? 0 : -2^b)) |scale| or zero + code scale (see formats/methods/innerq.py).
struct HybridGroups {
  static constexpr int MOST = LARGEST_HEAD + LANES;  // a vector may begin at the last but one
  float scale[MOST], zero[MOST];
  int32_t offset[MOST];  // -2^b where symmetric, else 0
  int32_t slot[MOST];

  HybridGroups(const uint8_t* scales, const uint8_t* slots, int count, int bits) {
    read_halves(scales, count, scale);
    for (int i = count; i < count + LANES; ++i) scale[i] = zero[i] = float(offset[i] = slot[i] = 0);
    for (int i = 0; i < count; ++i) {
      const bool symmetric = float_to_bits(scale[i]) >> 31;
      const uint32_t bytes = word(slots, i);
      slot[i] = int32_t(bytes);
      offset[i] = symmetric ? -(1 << bits) : 0;
      zero[i] = symmetric ? 0.0f : bits_to_float(bytes);
      scale[i] = __builtin_fabsf(scale[i]);
    }
  }

  // element e of LANES groups from i on, whose codes are `code`
  Floats value(int i, int e, Ints code) const {
    const Ints positive = (load_ints(slot + i) >> (8 * (e % 4) + e / 4)) & 1;
    return load(zero + i) + to_floats(code + (load_ints(offset + i) & (positive - 1))) * load(scale + i);
  }
};

inline void unpack_channel(const Layout& l, const Slab& slab, float* k) {
  float scale[LARGEST_HEAD], zero[LARGEST_HEAD];
  read_halves(slab.data + l.k_scale, int(l.d), scale);
  read_halves(slab.data + l.k_zero, int(l.d), zero);
  unpack_key_codes(slab.data + l.k_codes, int(l.d), int(l.key_bits), [&](int c, int t, Ints code) {
    store(k + c * SLAB + t, zero[c] + to_floats(code) * scale[c]);
  });
}

inline void unpack_boosted(const Layout& l, const Slab& slab, float* k) {
  const int d = int(l.d), boosted = int(l.boosted);
  float scale[LARGEST_HEAD], zero[LARGEST_HEAD];
  int32_t channels[LARGEST_HEAD];
  read_halves(slab.data + l.k_scale, d, scale);
  read_halves(slab.data + l.k_zero, d, zero);
  for (int c = 0; c < d; ++c) scale[c] = __builtin_fabsf(scale[c]);
  unpack_key_codes(slab.data + l.k_codes, d, 2, [&](int c, int t, Ints low) {
    store(k + c * SLAB + t, zero[c] + to_floats(low) * scale[c]);
  });
  boosted_channels(slab.data + l.k_scale, d, boosted, channels);
  unpack_key_codes(slab.data + l.k_high, boosted, 2, [&](int i, int t, Ints high) {
    float* to = k + channels[i] * SLAB + t;
    store(to, load(to) + to_floats(4 * high) * scale[channels[i]]);
  });
}

inline void unpack_hybrid(const Layout& l, const Slab& slab, float* k) {
  const int d = int(l.d), bits = int(l.key_bits);
  const HybridGroups groups(slab.data + l.k_scale, slab.data + l.k_slot, d, bits);  // by 32 channels, then tokens
  float norm[LARGEST_HEAD];
  read_halves(slab.page + l.k_inner_norm, d, norm);
  unpack_key_codes(slab.data + l.k_codes, d, bits, [&](int c, int t, Ints code) {
    store(k + c * SLAB + t, groups.value(c / SLAB * SLAB + t, c % SLAB, code) * norm[c]);
  });
}

inline void unpack_signs(const uint8_t* bits, const uint8_t* norms, int rows, float scale, float* k) {
  float norm[SLAB];
  read_halves(norms, SLAB, norm);
  for (int t = 0; t < SLAB; ++t) norm[t] *= scale;
  unpack_key_codes(bits, rows, 1, [&](int row, int t, Ints code) {
    store(k + row * SLAB + t, to_floats(2 * code - 1) * load(norm + t));
  });
}

// The page's tables: cos and sin of all angles of a pair, from the first one by rotation, and its radii.
inline void polar_tables(const Layout& l, const uint8_t* page, float* cosines, float* sines, float* radii) {
  const int pairs = l.d / 2, angles = 1 << l.key_bits, steps = 1 << l.radius_bits;
  constexpr int MOST = LARGEST_HEAD / 2;
  float angle0[MOST], angle_step[MOST], first_radius[MOST], radius_step[MOST];
  const float turn = 6.28318530718f;
  read_halves(page + l.k_radius_step, pairs, radius_step);
  if (!l.paper) {
    read_halves(page + l.k_angle0, pairs, angle0);
    read_halves(page + l.k_angle_step, pairs, angle_step);
    read_halves(page + l.k_radius0, pairs, first_radius);
  }
  for (int p = 0; p < pairs; ++p) {
    const float step = l.paper ? turn / angles : angle_step[p];
    const float first = l.paper ? 0.0f : angle0[p] + 0.5f * step;
    const float radius0 = l.paper ? 0.0f : first_radius[p] + 0.5f * radius_step[p];
    const float c = __builtin_cosf(step), s = __builtin_sinf(step);
    float x = __builtin_cosf(first), y = __builtin_sinf(first);
    for (int a = 0; a < angles; ++a) {
      cosines[p * 16 + a] = x;
      sines[p * 16 + a] = y;
      const float turned = x * c - y * s;
      y = x * s + y * c;
      x = turned;
    }
    for (int r = 0; r < steps; ++r) radii[p * 16 + r] = radius0 + float(r) * radius_step[p];
  }
}

inline size_t polar_floats(const Layout& l) { return 3 * 16 * size_t(l.d) / 2; }

// `tables` has polar_floats(l), those of the page `task.prepared`.
inline void unpack_polar(Task& task, const Slab& slab, float* tables, float* k) {
  const Layout& l = *task.layout;
  const Constants& constants = *task.constants;
  const int pairs = int(l.d) / 2;
  float *cosines = tables, *sines = tables + 16 * pairs, *radii = tables + 32 * pairs;
  if (task.prepared != slab.page) polar_tables(l, slab.page, cosines, sines, radii);
  task.prepared = slab.page;
  uint8_t angle[LARGEST_HEAD / 2 * SLAB], radius[LARGEST_HEAD / 2 * SLAB];
  if (l.key_bits == 4 && l.radius_bits == 4) {
    unpack_key_codes(slab.data + l.k_polar, pairs, 8, [&](int p, int t, Ints code) {
      for (int i = 0; i < LANES; ++i) angle[p * SLAB + t + i] = code[i] & 15, radius[p * SLAB + t + i] = code[i] >> 4;
    });
  } else {
    const auto put = [](uint8_t* to) {
      return [to](int p, int t, Ints code) {
        for (int i = 0; i < LANES; ++i) to[p * SLAB + t + i] = uint8_t(code[i]);
      };
    };
    unpack_key_codes(slab.data + l.k_angle, pairs, l.key_bits == 3 ? 2 : int(l.key_bits), put(angle));
    if (l.key_bits == 3)
      unpack_key_codes(slab.data + l.k_angle_high, (pairs + SLAB - 1) / SLAB * SLAB, 1, [&](int p, int t, Ints bit) {
        for (int i = 0; i < LANES && p < pairs; ++i) angle[p * SLAB + t + i] |= uint8_t(bit[i] << 2);
      });
    unpack_key_codes(slab.data + l.k_radius, pairs, l.radius_bits, put(radius));
  }
  for (int p = 0; p < pairs; ++p) {
    float *x = k + constants.pairs[p] * SLAB, *y = k + constants.pairs[pairs + p] * SLAB;
    for (int t = 0; t < SLAB; ++t) {
      const int a = p * 16 + angle[p * SLAB + t];
      const float r = radii[p * 16 + radius[p * SLAB + t]];
      x[t] = r * cosines[a];
      y[t] = r * sines[a];
    }
  }
}

// k[c][t] of a slab, for all formats whose pages have channels; `tables` as in unpack_polar.
inline void unpack_keys(Task& task, const Slab& slab, float* tables, float* k) {
  const Layout& l = *task.layout;
  switch (l.keys) {
    case Keys::channel: return unpack_channel(l, slab, k);
    case Keys::boosted: return unpack_boosted(l, slab, k);
    case Keys::hybrid: return unpack_hybrid(l, slab, k);
    case Keys::polar: return unpack_polar(task, slab, tables, k);
    case Keys::raw: return read_raw(slab.data + l.k_raw, l.raw_dtype, int(l.d) * SLAB, k);
    case Keys::sketch: return;
    case Keys::transformed: return;
  }
}

inline void store_some(float* p, Floats x, int count) {
  if (count == LANES)
    store(p, x);
  else
    std::memcpy(p, &x, 4 * size_t(count));
}

// Calls put(token, first channel, codes, count) for plane-quad value codes, count <= LANES channels at a time.
template <class Put>
inline void unpack_value_codes(const uint8_t* codes, int d, int bits, Put put) {
  const int planes = 8 / bits, stride = d / planes, mask = (1 << bits) - 1;
  for (int quad = 0; quad < SLAB / 4; ++quad)
    for (int c = 0; c < stride; c += LANES) {
      const int count = stride - c < LANES ? stride - c : LANES;
      const uint8_t* from = codes + 4 * (quad * stride + c);
      Ints w{};
      if (count == LANES)
        w = load_ints(from);
      else
        std::memcpy(&w, from, 4 * size_t(count));
      for (int plane = 0; plane < planes; ++plane)
        for (int j = 0; j < 4; ++j) put(4 * quad + j, plane * stride + c, (w >> (8 * j + bits * plane)) & mask, count);
    }
}

inline void unpack_token_values(const Layout& l, const Slab& slab, float* v) {
  const int d = int(l.d), width = int(l.group);
  unpack_value_codes(slab.data + l.v_codes, d, int(l.value_bits), [&](int t, int c, Ints code, int count) {
    store_some(v + t * d + c, to_floats(code), count);
  });
  for (int first = 0, g = 0; first < d; first += width, ++g) {
    float scale[SLAB], zero[SLAB];
    read_halves(slab.data + l.v_scale + g * 2 * SLAB, SLAB, scale);
    read_halves(slab.data + l.v_zero + g * 2 * SLAB, SLAB, zero);
    const int last = first + width < d ? first + width : d;
    for (int t = slab.low; t < slab.high; ++t) {
      float* row = v + t * d;
      int c = first;
      for (; c + LANES <= last; c += LANES) store(row + c, zero[t] + load(row + c) * scale[t]);
      for (; c < last; ++c) row[c] = zero[t] + row[c] * scale[t];
    }
  }
}

inline void unpack_hybrid_values(const Layout& l, const Slab& slab, float* v) {
  const int d = int(l.d), bits = int(l.value_bits);
  const HybridGroups channels(slab.data + l.v_scale, slab.data + l.v_slot, d, bits);
  unpack_value_codes(slab.data + l.v_codes, d, bits, [&](int t, int c, Ints code, int count) {
    store_some(v + t * d + c, channels.value(c, t, code), count);
  });
}

inline void unpack_searched_values(const Layout& l, const Slab& slab, float* v) {
  const int d = int(l.d), low = int(low_value_bits(l));
  float scale[SLAB];
  read_scales(slab.data + l.v_scale, scale);
  unpack_value_codes(slab.data + l.v_codes, d, low, [&](int t, int c, Ints code, int count) {
    store_some(v + t * d + c, to_floats(code), count);
  });
  if (l.value_bits > low)
    unpack_value_codes(slab.data + l.v_high, d, 1, [&](int t, int c, Ints code, int count) {
      float* to = v + t * d + c;
      for (int i = 0; i < count; ++i) to[i] += float(code[i] << low);
    });
  const float middle = 0.5f * float((1 << l.value_bits) - 1);
  for (int t = slab.low; t < slab.high; ++t) {
    const Floats step = splat(scale[t] * float(l.value_step));
    for (int c = 0; c < d; c += LANES) store(v + t * d + c, (load(v + t * d + c) - middle) * step);
  }
}

// v[t][c] of the slab; arbitrary numbers for tokens that are not attended.
inline void unpack_values(const Layout& l, const Slab& slab, float* v) {
  switch (l.values) {
    case Values::token: return unpack_token_values(l, slab, v);
    case Values::hybrid: return unpack_hybrid_values(l, slab, v);
    case Values::searched: return unpack_searched_values(l, slab, v);
    case Values::raw: return read_raw(slab.data + l.v_raw, l.raw_dtype, int(l.d) * SLAB, v);
  }
}

}  // namespace float32
}  // namespace

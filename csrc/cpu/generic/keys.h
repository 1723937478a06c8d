// Keys of every format, unpacked to float32: the portable path, and what serves option combinations that have no
// kernel of their own.
//
//     S[r][t] = sum_c q[r][c] k[c][t]
//
// A slab is unpacked once, channel by channel with its 32 tokens side by side, then multiplied with all rows.
#pragma once

#include "../half.h"
#include "../kernel.h"
#include "gemm.h"

namespace {
namespace generic {

using namespace kvq;

inline uint32_t word(const uint8_t* codes, int index) {
  uint32_t w;
  std::memcpy(&w, codes + 4 * index, 4);
  return w;
}

// Calls put(channel, codes of its 32 tokens) for n channels of plane-quad key codes.
template <class Put>
inline void unpack_key_codes(const uint8_t* codes, int n, int bits, Put put) {
  const int planes = 8 / bits, stride = n / planes, mask = (1 << bits) - 1;
  int32_t code[SLAB];
  for (int quad = 0; quad < stride / 4; ++quad)
    for (int plane = 0; plane < planes; ++plane)
      for (int j = 0; j < 4; ++j) {
        const int shift = 8 * j + bits * plane;
        for (int t = 0; t < SLAB; ++t) code[t] = int32_t(word(codes, quad * SLAB + t) >> shift) & mask;
        put(plane * stride + 4 * quad + j, code);
      }
}

inline void read_halves(const uint8_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) {
    uint16_t h;
    std::memcpy(&h, from + 2 * i, 2);
    to[i] = half_to_float(h);
  }
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

// The mode of a hybrid group: k = (code + (sign ? 0 : -2^b)) |scale| or zero + code scale (see formats/innerq.py).
struct HybridGroup {
  float scale[SLAB], zero[SLAB];
  int32_t offset[SLAB];  // -2^b where symmetric, else 0
  uint32_t slot[SLAB];

  void read(const uint8_t* scales, const uint8_t* slots, int bits) {
    read_halves(scales, SLAB, scale);
    for (int i = 0; i < SLAB; ++i) {
      const bool symmetric = float_to_bits(scale[i]) >> 31;
      slot[i] = word(slots, i);
      offset[i] = symmetric ? -(1 << bits) : 0;
      zero[i] = symmetric ? 0.0f : bits_to_float(slot[i]);
      scale[i] = __builtin_fabsf(scale[i]);
    }
  }

  // element e of the group, whose code is `code`
  float value(int i, int e, int32_t code) const {
    const int32_t inverted = 1 - int32_t(slot[i] >> (8 * (e % 4) + e / 4) & 1);
    return zero[i] + float(code + offset[i] * inverted) * scale[i];
  }
};

inline void unpack_channel(const Layout& l, const Slab& slab, float* k) {
  const uint8_t *scale = slab.data + l.key_at[1], *zero = slab.data + l.key_at[2];
  unpack_key_codes(slab.data + l.key_at[0], l.d, l.key_bits, [&](int c, const int32_t* code) {
    float s, z;
    read_halves(scale + 2 * c, 1, &s);
    read_halves(zero + 2 * c, 1, &z);
    for (int t = 0; t < SLAB; ++t) k[c * SLAB + t] = z + float(code[t]) * s;
  });
}

inline void unpack_hybrid(const Layout& l, const Slab& slab, float* k) {
  HybridGroup groups[8];
  float norm[256];
  read_halves(slab.page + l.page_at[0], l.d, norm);
  for (int g = 0; g < l.d / 32; ++g)
    groups[g].read(slab.data + l.key_at[1] + g * 2 * SLAB, slab.data + l.key_at[2] + g * 4 * SLAB, l.key_bits);
  unpack_key_codes(slab.data + l.key_at[0], l.d, l.key_bits, [&](int c, const int32_t* code) {
    const HybridGroup& g = groups[c / 32];
    for (int t = 0; t < SLAB; ++t) k[c * SLAB + t] = norm[c] * g.value(t, c % 32, code[t]);
  });
}

inline void unpack_signs(const uint8_t* bits, const uint8_t* norms, int rows, float scale, float* k) {
  float norm[SLAB];
  read_halves(norms, SLAB, norm);
  unpack_key_codes(bits, rows, 1, [&](int row, const int32_t* code) {
    for (int t = 0; t < SLAB; ++t) k[row * SLAB + t] = float(2 * code[t] - 1) * scale * norm[t];
  });
}

// The page's tables: cos and sin of all angles of a pair, from the first one by rotation, and its radii.
inline void polar_tables(const Layout& l, const uint8_t* page, float* cosines, float* sines, float* radii) {
  const int pairs = l.d / 2, angles = 1 << l.key_bits, steps = 1 << l.radius_bits;
  float grid[4][128];
  const float turn = 6.28318530718f;
  for (int i = 0; i < (l.paper ? 1 : 4); ++i) read_halves(page + l.page_at[i], pairs, grid[i]);
  for (int p = 0; p < pairs; ++p) {
    const float step = l.paper ? turn / angles : grid[1][p];
    const float first = l.paper ? 0.0f : grid[0][p] + 0.5f * step;
    const float radius_step = l.paper ? grid[0][p] : grid[3][p];
    const float radius0 = l.paper ? 0.0f : grid[2][p] + 0.5f * radius_step;
    const float c = __builtin_cosf(step), s = __builtin_sinf(step);
    float x = __builtin_cosf(first), y = __builtin_sinf(first);
    for (int a = 0; a < angles; ++a) {
      cosines[p * 16 + a] = x;
      sines[p * 16 + a] = y;
      const float turned = x * c - y * s;
      y = x * s + y * c;
      x = turned;
    }
    for (int r = 0; r < steps; ++r) radii[p * 16 + r] = radius0 + float(r) * radius_step;
  }
}

inline void unpack_polar(const Layout& l, const Constants& constants, const Slab& slab, const float* cosines,
                         const float* sines, const float* radii, float* k) {
  const int pairs = l.d / 2;
  uint8_t angle[128 * SLAB], radius[128 * SLAB];
  if (l.key_bits == 4 && l.radius_bits == 4) {
    unpack_key_codes(slab.data + l.key_at[0], pairs, 8, [&](int p, const int32_t* code) {
      for (int t = 0; t < SLAB; ++t) angle[p * SLAB + t] = code[t] & 15, radius[p * SLAB + t] = code[t] >> 4;
    });
  } else {
    const auto put = [](uint8_t* to) {
      return [to](int p, const int32_t* code) {
        for (int t = 0; t < SLAB; ++t) to[p * SLAB + t] = uint8_t(code[t]);
      };
    };
    unpack_key_codes(slab.data + l.key_at[0], pairs, l.key_bits, put(angle));
    unpack_key_codes(slab.data + l.key_at[1], pairs, l.radius_bits, put(radius));
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

// S q_in = S q - S_out q_out and S' q_out: the slab's own features, because each slab has its own outlier channels.
inline void sketch_features(const Task& task, const uint8_t* index, int row, float* f) {
  const Layout& l = *task.layout;
  const float* q = task.query + row * l.d;
  std::memcpy(f, task.features + row * l.sketch_rows, 4 * l.sketch_rows);
  std::memset(f + l.sketch_rows, 0, 4 * l.outer_rows);
  for (int i = 0; i < l.outliers; ++i) {
    const int c = index[i] < l.d ? index[i] : 0;
    const float* column = task.constants->sketch + c * l.sketch_rows;
    const float* outer = task.constants->outer + i * l.outer_rows;
    for (int j = 0; j < l.sketch_rows; ++j) f[j] -= q[c] * column[j];
    for (int j = 0; j < l.outer_rows; ++j) f[l.sketch_rows + j] += q[c] * outer[j];
  }
}

inline int features_of(const Layout& l) { return l.keys == Keys::sketch ? l.sketch_rows + l.outer_rows : l.d; }

// key_work: unpacked features [F][32], then the polar tables or, for QJL, the rows' features of a slab
inline size_t key_bytes(const Layout& l) {
  size_t extra = 0;
  if (l.keys == Keys::polar) extra = 3 * 16 * l.d / 2;
  if (l.keys == Keys::sketch) extra = size_t(ROWS) * features_of(l);
  return align64(4 * (size_t(features_of(l)) * SLAB + extra));
}

inline void begin_keys(Task&) {}

inline void score(Task& task, const Slab& slab, int column) {
  const Layout& l = *task.layout;
  const int features = features_of(l);
  float* k = reinterpret_cast<float*>(task.key_work);
  float* extra = k + features * SLAB;
  const float* query = task.query;
  switch (l.keys) {
    case Keys::channel:
      unpack_channel(l, slab, k);
      break;
    case Keys::hybrid:
      unpack_hybrid(l, slab, k);
      break;
    case Keys::raw:
      read_raw(slab.data + l.key_at[0], l.raw_dtype, l.d * SLAB, k);
      break;
    case Keys::polar: {
      const int table = 16 * l.d / 2;
      if (task.prepared != slab.page) polar_tables(l, slab.page, extra, extra + table, extra + 2 * table);
      task.prepared = slab.page;
      unpack_polar(l, *task.constants, slab, extra, extra + table, extra + 2 * table, k);
      break;
    }
    case Keys::sketch: {
      const Constants& constants = *task.constants;
      unpack_signs(slab.data + l.key_at[0], slab.data + l.key_at[1], l.sketch_rows, constants.sketch_scale, k);
      unpack_signs(slab.data + l.key_at[2], slab.data + l.key_at[3], l.outer_rows, constants.outer_scale,
                   k + l.sketch_rows * SLAB);
      for (int r = 0; r < task.rows; ++r) sketch_features(task, slab.data + l.key_at[4], r, extra + r * features);
      query = extra;
      break;
    }
  }
  multiply(query, features, task.rows, features, k, SLAB, task.scores + column, BLOCK);
}

}  // namespace generic
}  // namespace

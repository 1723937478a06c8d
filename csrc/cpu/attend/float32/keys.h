//     S[r][t] = sum_c q[r][c] k[c][t]
//
// Keys of every format, unpacked to float32: for any processor, and for options that have no integer kernel. A slab is
// unpacked once, channel by channel with its 32 tokens side by side, and then multiplied with all rows.
#pragma once

#include "../../isa/matrix.h"
#include "../../pack/unpack.h"
#include "transformed.h"

namespace {
namespace float32 {

using namespace kvq;

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

inline int features_of(const Layout& l) {
  if (l.keys == Keys::sketch) return l.sketch_rows + l.outer_rows;
  return l.keys == Keys::transformed ? int(projected(l)) : l.d;
}

// key_work: unpacked features [F][32], then the polar tables or, for QJL, the rows' features of a slab
inline size_t key_bytes(const Layout& l) {
  size_t extra = 0;
  if (l.keys == Keys::polar) extra = polar_floats(l);
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
  if (l.keys == Keys::sketch) {
    const Constants& constants = *task.constants;
    unpack_signs(slab.data + l.k_bits, slab.data + l.k_norm, l.sketch_rows, constants.sketch_scale, k);
    if (l.outliers)
      unpack_signs(slab.data + l.ko_bits, slab.data + l.ko_norm, l.outer_rows, constants.outer_scale,
                   k + l.sketch_rows * SLAB);
    for (int r = 0; r < task.rows; ++r) sketch_features(task, slab.data + l.ko_index, r, extra + r * features);
    query = extra;
  } else if (l.keys == Keys::transformed) {
    unpack_transformed(l, *task.constants, slab, k);
    repeat_phases(l, *task.constants, slab, k + l.d * SLAB);
    query = task.features;
  } else {
    unpack_keys(task, slab, extra, k);
  }
  multiply(query, features, task.rows, features, k, SLAB, task.scores + column, BLOCK);
}

}  // namespace float32
}  // namespace

//     S = q k,  P = 2^(S - m),  O = O + P v          k[slab][c][t], v[c / 32][t][c % 32]
//
// Many query rows, as in a prompt's chunk: a block of slabs is unpacked to float32 once and multiplied with all
// rows, ROWS at a time. Unpacking then costs next to nothing, and the products run at the processor's full rate.
//
// QJL's keys become vectors like the others': a key's estimate is S_in^T sign |k| c(d) / m in all channels but the
// slab's outliers, where it is S'^T sign' |k_out| c(n) / m_out. q . k_t is then the same sum in another order.
#pragma once

#include "cap.h"
#include "keys.h"
#include "softmax.h"
#include "transformed.h"

namespace {
namespace float32 {

// QJL's k[c][t] of a slab; `work` has sketch_floats(l).
inline void rebuild_sketched(const Layout& l, const Constants& constants, const Slab& slab, float* work, float* k) {
  const int d = int(l.d), m = int(l.sketch_rows), outer_m = int(l.outer_rows), n = int(l.outliers);
  unpack_signs(slab.data + l.k_bits, slab.data + l.k_norm, m, constants.sketch_scale, work);
  multiply(constants.sketch, m, d, m, work, SLAB, k, SLAB);
  if (!n) return;
  unpack_signs(slab.data + l.ko_bits, slab.data + l.ko_norm, outer_m, constants.outer_scale, work);
  float* outliers = work + outer_m * SLAB;
  multiply(constants.outer, outer_m, n, outer_m, work, SLAB, outliers, SLAB);
  const uint8_t* index = slab.data + l.ko_index;
  for (int i = 0; i < n; ++i) std::memcpy(k + (index[i] < d ? index[i] : 0) * SLAB, outliers + i * SLAB, 4 * SLAB);
}

inline size_t sketch_floats(const Layout& l) {
  const int64_t outer = l.outer_rows + l.outliers;
  return size_t(l.sketch_rows > outer ? l.sketch_rows : outer) * SLAB;
}

// Any format's k[c][t] of a slab, with `tables` behind it: slab_floats(l) numbers.
inline size_t slab_floats(const Layout& l) {
  size_t tables = 0;
  if (l.keys == Keys::sketch) tables = sketch_floats(l);
  if (l.keys == Keys::polar) tables = polar_floats(l);
  if (l.keys == Keys::transformed) tables = size_t(l.d) * SLAB;
  return size_t(l.d) * SLAB + tables;
}

inline void unpack_any_keys(Task& task, const Slab& slab, float* tables, float* k) {
  const Layout& l = *task.layout;
  if (l.keys == Keys::sketch) return rebuild_sketched(l, *task.constants, slab, tables, k);
  if (l.keys == Keys::transformed) return rebuild_transformed(l, *task.constants, slab, tables, k);
  unpack_keys(task, slab, tables, k);
}

inline size_t many_bytes(const Layout& l, int64_t) {
  return align64(4 * (2 * size_t(l.d) * BLOCK + slab_floats(l)));
}

inline void begin_many(Task&) {}

// The values of slab `s` of a block, by panels of 32 channels: whole rows would lie a power of two apart, where a cache
// has few places. Tokens that are not attended have weight 0 but may be NaN, so they are left out.
inline void unpack_value_panels(const Layout& l, const Slab& slab, int s, float* rows, float* v) {
  const int d = int(l.d);
  unpack_values(l, slab, rows);
  for (int c = 0; c < d; c += SLAB) {
    float* panel = v + c * BLOCK + s * SLAB * SLAB;
    std::memset(panel, 0, 4 * SLAB * SLAB);
    for (int t = slab.low; t < slab.high; ++t) std::memcpy(panel + t * SLAB, rows + t * d + c, 4 * SLAB);
  }
}

// `task.rows` is not limited; `task.scores` is for ROWS of them, `task.key_work` has many_bytes.
inline void many(Task& task, const Slab* slabs, int count) {
  const Layout& l = *task.layout;
  const int d = int(l.d);
  float* k = reinterpret_cast<float*>(task.key_work);
  float *v = k + d * BLOCK, *rows = v + d * BLOCK, *tables = rows + d * SLAB;
  for (int s = 0; s < count; ++s) {
    unpack_any_keys(task, slabs[s], tables, k + s * d * SLAB);
    unpack_value_panels(l, slabs[s], s, rows, v);
  }
  Task part = task;
  for (int first = 0; first < task.rows; first += ROWS) {
    part.rows = task.rows - first < ROWS ? task.rows - first : ROWS;
    part.query = task.query + first * d;
    part.out = task.out + first * d;
    part.top = task.top + first;
    part.total = task.total + first;
    for (int s = 0; s < count; ++s)
      multiply(part.query, d, part.rows, d, k + s * d * SLAB, SLAB, part.scores + s * SLAB, BLOCK);
    if (part.cap > 0) cap(part.scores, BLOCK, part.rows, count * SLAB, part.cap);
    softmax(part, slabs, count);
    for (int c = 0; c < d; c += SLAB)
      multiply<true>(part.scores, BLOCK, part.rows, count * SLAB, v + c * BLOCK, SLAB, part.out + c, d);
  }
}

}  // namespace float32
}  // namespace

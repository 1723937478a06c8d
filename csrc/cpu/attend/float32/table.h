// The float32 kernels as a table (see dispatch/attend_kernels.h).
#pragma once

#include "keys.h"
#include "many.h"
#include "raw.h"
#include "softmax.h"
#include "transformed.h"
#include "values.h"

namespace {
namespace float32 {

inline kvq::KeyKernel keys(const kvq::Layout&, int) { return {key_bytes, begin_keys, kvq::each_slab<score>, false}; }

inline kvq::ValueKernel values(const kvq::Layout&, int) { return {value_bytes, add, false}; }

inline void project(const Layout& l, const kvq::Constants& constants, const float* query, int rows, float* features) {
  if (l.keys == Keys::transformed) return project_transformed(l, constants, query, rows, features);
  for (int64_t j = 0; j < l.sketch_rows; j += kvq::SLAB)
    multiply(query, l.d, rows, l.d, constants.sketch + j, l.sketch_rows, features + j, l.sketch_rows);
}

// Measured: with fewer rows, unpacking for all of them costs more than it saves.
inline int64_t many_rows(const Layout& l) {
  switch (l.keys) {
    case Keys::channel: return 48;
    case Keys::boosted: return 48;
    case Keys::hybrid: return 96;
    case Keys::polar: return 192;
    case Keys::sketch: return 384;
    case Keys::transformed: return 384;  // not measured: as QJL's, whose keys are also products
    case Keys::raw: break;
  }
  return 32;
}

inline int64_t never(const Layout&) { return INT64_MAX; }

constexpr kvq::ManyKernel many_kernel = {many_rows, many_bytes, begin_many, many, true};

}  // namespace float32
}  // namespace

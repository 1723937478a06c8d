// The kernels of this directory as a table (see kernel.h).
#pragma once

#include "keys.h"
#include "raw.h"
#include "softmax.h"
#include "values.h"

namespace {
namespace generic {

inline kvq::KeyKernel keys(const kvq::Layout&, int) { return {key_bytes, begin_keys, score}; }

inline kvq::ValueKernel values(const kvq::Layout&, int) { return {value_bytes, add}; }

inline void project(const float* query, int rows, int64_t d, const float* sketch, int64_t m, float* features) {
  for (int64_t j = 0; j < m; j += kvq::SLAB) multiply(query, d, rows, d, sketch + j, m, features + j, m);
}

}  // namespace generic
}  // namespace

// Full-precision tokens, wherever they lie: in the ring, in the sinks, or among a step's new tokens.
#pragma once

#include "layout.h"

namespace kvq {

// Keys and values of tokens: (blocks, slots, heads, head_size), innermost stride 1, the others in elements.
struct Tokens {
  const void *key, *value;
  int64_t blocks, slots;
  int64_t key_strides[3], value_strides[3];

  int64_t rows() const { return blocks * slots; }
};

inline const char* element(const void* base, Dtype dtype, int64_t at) {
  return static_cast<const char*>(base) + at * (dtype == Dtype::f32 ? 4 : 2);
}

}  // namespace kvq

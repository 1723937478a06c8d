// What the kernels know of a format: kinds of codecs and where their fields lie in a record.
//
// vllm_kvq/kernels/cpu.py fills a Layout from a PageFormat; the byte layouts themselves are described at the top of
// the modules in vllm_kvq/formats.
#pragma once

#include <cstdint>

namespace kvq {

constexpr int SLAB = 32;         // tokens that are packed together
constexpr int BLOCK_SLABS = 4;   // slabs between two updates of the running softmax
constexpr int BLOCK = BLOCK_SLABS * SLAB;

enum class Keys : int64_t {
  channel,  // SQuat, KIVI    at: codes, scale, zero
  hybrid,   // InnerQ         at: codes, scale, slot                          page: norm
  sketch,   // QJL            at: bits, norm, outer bits, outer norm, index
  polar,    // PolarQuant     at: codes | angle, radius                       page: angle0, angle step, radius0, radius step
  raw,      // lossless       at: keys
};

enum class Values : int64_t {
  token,   // per token       at: codes, scale, zero
  hybrid,  // InnerQ          at: codes, scale, slot
  raw,     // 16 or 32 bits   at: values
};

enum class Dtype : int64_t { f32, f16, bf16 };

// Plain 64-bit fields in the order of `Layout` in cpu.py: the struct is filled by one copy of an int64 array.
struct Layout {
  int64_t head_size;     // channels of the model
  int64_t d;             // channels as stored, a multiple of 32
  int64_t tokens;        // N
  int64_t record_bytes;
  int64_t slabs_at;      // bytes before the first slab
  int64_t slab_bytes;
  Keys keys;
  int64_t key_bits;      // scalar codes; polar: bits of the angle
  int64_t radius_bits;   // polar
  int64_t paper;         // polar: the fixed grid, whose only parameter is the radius step
  int64_t sketch_rows;   // m
  int64_t outer_rows;    // m_out
  int64_t outliers;      // n
  Values values;
  int64_t value_bits;
  int64_t group;         // channels per group of the per-token values
  Dtype raw_dtype;
  int64_t key_at[5];     // from the start of a slab
  int64_t page_at[4];    // from the start of the record
  int64_t value_at[3];   // from the start of a slab
};

constexpr int LAYOUT_FIELDS = sizeof(Layout) / sizeof(int64_t);

// Tables that belong to a format but to no page.
struct Constants {
  const float* sketch;     // QJL: S transposed, [d][m]
  const float* outer;      // QJL: S' transposed, [n][m_out]
  float sketch_scale;      // c(d) / m
  float outer_scale;       // c(n) / m_out
  const int32_t* pairs;    // polar: [2][d / 2], the x and the y channel of each pair
};

}  // namespace kvq

// attend_packed without Python: plain pointers, so that tests and fuzzers can call it too.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "layout.h"

namespace kvq {

struct Attend {
  Layout layout;
  Constants constants;
  // queries (requests, queries, query_heads, head_size), innermost stride 1, the others in elements
  int64_t requests, queries, query_heads;
  const void* query;
  Dtype query_dtype;
  int64_t query_strides[3];
  // records (pages, heads), strides in bytes
  int64_t pages, heads;
  const uint8_t* records;
  int64_t page_stride, head_stride;
  // the list of attended pages
  int64_t listed;
  const int64_t *page_ids, *owner, *low, *high;
  float scale;
  float* out;  // (requests, queries, query_heads, head_size), dense
  float* lse;  // (requests, queries, query_heads), dense; -inf where nothing was attended
  int threads;
  int isa;  // see cpu.h
};

// Throws std::out_of_range before anything is read or written if the list leaves the tensors.
void attend_packed(const Attend& a);

// Keys and values of tokens: (blocks, slots, heads, head_size), innermost stride 1, the others in elements.
struct Tokens {
  const void *key, *value;
  int64_t blocks, slots;
  int64_t key_strides[3], value_strides[3];

  int64_t rows() const { return blocks * slots; }
};

struct AttendRaw {
  // queries (requests, queries, query_heads, head_size), innermost stride 1, the others in elements
  int64_t requests, queries, query_heads, head_size;
  const void* query;
  Dtype query_dtype;
  int64_t query_strides[3];
  Tokens pool, more;
  int64_t heads;
  Dtype dtype;
  int64_t tokens;       // per request
  const int64_t* rows;  // (requests, tokens): row of `pool` (block * slots + slot), then of `more`; negative: absent
  const uint8_t* seen;  // (requests, queries, tokens)
  float scale;
  // Other parts of the same attention, as Attend leaves them, null where there are none: merged into the output.
  const float *prior_out[2], *prior_lse[2];
  void* out;  // row (request, query) is out_rows[..] of (out_count, query_heads, head_size), strides in elements
  Dtype out_dtype;
  int64_t out_count, out_strides[2];
  const int64_t* out_rows;
  float* lse;  // (requests, queries, query_heads) of this part alone, or null
  int threads, isa;
};

// Throws std::out_of_range before anything is read or written if a row leaves its tensor.
void attend_raw(const AttendRaw& a);

}  // namespace kvq

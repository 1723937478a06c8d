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

struct AttendRaw {
  // queries (requests, queries, query_heads, head_size), innermost stride 1, the others in elements
  int64_t requests, queries, query_heads, head_size;
  const void* query;
  Dtype query_dtype;
  int64_t query_strides[3];
  // tokens (blocks, slots, heads, head_size), innermost stride 1, the others in elements
  int64_t blocks, slots, heads;
  const void *key, *value;
  Dtype dtype;
  int64_t key_strides[3], value_strides[3];
  int64_t tokens;          // per request
  const int64_t* rows;     // (requests, tokens): block * slots + slot, negative where absent; null: block i is request i
  const uint8_t* seen;     // (requests, queries, tokens)
  float scale;
  float *out, *lse;        // as in Attend
  int threads, isa;
};

// Throws std::out_of_range before anything is read or written if a row leaves the blocks.
void attend_raw(const AttendRaw& a);

}  // namespace kvq

// Attention of queries over packed pages and full-precision tokens, without Python: plain pointers in, plain pointers
// out.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "../call.h"
#include "../pages.h"
#include "../tokens.h"
#include "../dispatch/attend_kernels.h"

namespace kvq {

constexpr float LOG2_E = 1.44269504089f;

struct Packed {
  Layout layout;
  Constants constants;
  Pool pool;
  PageList list;
};

// Full-precision tokens, `tokens` per request.
struct Raw {
  Tokens pool, more;
  Dtype dtype;
  int64_t tokens = 0;
  const int64_t* rows;  // (requests, tokens): row of `pool` (block * slots + slot), then of `more`; negative: absent
  const uint8_t* seen;  // (requests, queries, tokens)
};

struct Attend {
  // queries (requests, queries, query_heads, head_size), innermost stride 1, the others in elements
  int64_t requests, queries, query_heads, head_size, heads;
  const void* query;
  Dtype query_dtype;
  int64_t query_strides[3];
  Packed packed;  // list.count == 0: none
  Raw raw;        // tokens == 0: none
  Scores scores;
  // Other parts of the same attention, outputs (requests, queries, query_heads, head_size) and their log-sum-exps,
  // dense; null where there are none. They are merged into the output.
  const float *prior_out[2], *prior_lse[2];
  // Row (request, query) is out_rows[..], or row request * queries + query where that is null, of
  // (out_count, query_heads, head_size), strides in elements.
  void* out;
  Dtype out_dtype;
  int64_t out_count, out_strides[2];
  const int64_t* out_rows;
  float* lse;  // (requests, queries, query_heads) without the prior parts, or null; -inf where nothing was attended
  Team team;
};

// Throws std::out_of_range before anything is read or written if an index leaves its tensor.
void attend(const Attend& a);

// Where a full-precision token lies: key + head * key_head bytes, or null.
struct Place {
  const char *key, *value;
  int64_t key_head, value_head;
};
// Computed for all requests' tokens, once for all heads: each costs a division.
std::vector<Place> locate_raw(const Attend& a);

// Query rows [row, row + rows) of one KV head of one request: queries x query heads of the KV head, in that order.
struct RowBlock {
  int64_t request, head, row, rows;
};

// As in dispatch/attend_kernels.h: out [rows][d], top and total [rows].
struct RunningSoftmax {
  float *out, *top, *total;
};

// Over the full-precision tokens of the request, which lie at `places`. `work` holds raw_work_floats(rows, d) numbers.
void attend_raw_rows(const Attend& a, const Place* places, const RowBlock& block, const RunningSoftmax& softmax,
                     float* work);
inline int64_t raw_work_floats(int64_t rows, int64_t d) { return rows * d + 2 * SLAB * d + ROWS * SLAB + rows * d / 2; }

}  // namespace kvq

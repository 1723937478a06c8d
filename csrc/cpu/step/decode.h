// One decode step of one layer in one call: requests with history and a few new tokens each are planned, packed,
// stored and attended here. Any other step is planned in Python (kernels/torch/plan.py, whose words are used here).
#pragma once

#include <cstdint>

#include "../call.h"
#include "../pages.h"
#include "../tokens.h"

namespace kvq {

// Block ids of requests, (requests, width); -1: none.
struct Table {
  const int32_t* ids;
  int64_t stride, width;

  int64_t at(int64_t request, int64_t column) const { return column < width ? ids[request * stride + column] : -1; }
};

// The layout and use of companions, sidecar and sink pages (kernels/slots.py). Filled by name, like Layout.
#define KVQ_COMPANION_FIELDS(FIELD)                                          \
  FIELD(int64_t, unit)            /* P */                                    \
  FIELD(int64_t, window)          /* W */                                    \
  FIELD(int64_t, sinks)           /* S */                                    \
  FIELD(int64_t, drafts)          /* speculative tokens of a step at most */ \
  FIELD(int64_t, ring)            /* R */                                    \
  FIELD(int64_t, ring_at)                                                    \
  FIELD(int64_t, state_at)                                                   \
  FIELD(int64_t, header_at)       /* bytes, in a request's first block */    \
  FIELD(int64_t, state_rows)                                                 \
  FIELD(int64_t, slots_per_block)                                            \
  FIELD(int64_t, blocks)          /* of a request's sidecar */

// What a request's sidecar says of itself; a zero magic: nothing yet.
struct SideHeader {
  int32_t magic, start, next;
};

struct Companions {
  KVQ_COMPANION_FIELDS(KVQ_MEMBER)
};

struct Decode {
  Layout layout;
  Constants constants;
  Companions cut;
  // The batch: tokens [query_start[i], query_start[i + 1]) are request i's, the last of seq_lens[i].
  int64_t requests;
  const int32_t *query_start, *seq_lens;
  Table pages_of, side_of, sinks_of;
  // New tokens: (tokens, query_heads, head_size), strides in elements, and (tokens, 1, heads, head_size).
  int64_t tokens, query_heads;
  const void* query;
  int64_t query_strides[2];
  Tokens fresh;
  // Whether this layer packs and stores its new tokens. If not, it has no cache of its own: it attends the caches of
  // another layer, which has already updated them in this step, and `fresh` is empty.
  bool update;
  Dtype dtype;
  // Caches: records; the slots of companions; and the sidecar's blocks themselves.
  Pool pool;
  Tokens side, sink;
  char* side_blocks;
  int64_t side_stride;  // bytes
  void* out;            // (tokens, query_heads, head_size), strides in elements
  Dtype out_dtype;
  int64_t out_strides[2];
  Scores scores;
  Team team;
};

// A request has no header yet, or more new tokens than drafts + 1: nothing was read or written.
constexpr int64_t NOT_DECODING = -1;

// Returns how many elements were replaced before packing, or NOT_DECODING. Throws std::runtime_error where the caches
// hold other tokens than the batch says, std::out_of_range for an id that leaves its cache; before anything is written.
int64_t decode(const Decode& d);

}  // namespace kvq

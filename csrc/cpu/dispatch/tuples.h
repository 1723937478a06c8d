// Tensors that belong together: Python passes each of these lists as one tuple (kernels/cpu/tuples.py).
//
// Each list is written once. It generates the struct and the names that the library exports, with which
// kernels/cpu/layout.py compares Python's.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

// TENSOR(name); int64, a number per page: kvq::PageList
#define KVQ_PAGE_LIST(TENSOR) TENSOR(ids) TENSOR(owner) TENSOR(low) TENSOR(high)

// Full-precision tokens: two pools of them, and where in them each request's lie: kvq::Raw
#define KVQ_HELD(TENSOR)                                     \
  TENSOR(key)        /* as of a pair */                      \
  TENSOR(value)                                              \
  TENSOR(more_key)                                           \
  TENSOR(more_value)                                         \
  TENSOR(rows)       /* (requests, tokens) */                \
  TENSOR(seen)       /* bytes (requests, queries, tokens) */

// A number per pack unit: kvq::Units
#define KVQ_UNITS(TENSOR)                            \
  TENSOR(page)                                       \
  TENSOR(unit)                                       \
  TENSOR(rows)       /* (units, tokens of a unit) */ \
  TENSOR(owner)                                      \
  TENSOR(follows)    /* bytes */                     \
  TENSOR(position)   /* of a unit's first token */

// Keys and values (blocks, slots, heads, head_size); a step's new tokens are blocks of one slot.
#define KVQ_PAIR(TENSOR) TENSOR(key) TENSOR(value)

// A part of an attention, (requests, queries, query heads, head_size), and the log-sum-exp of its scores
#define KVQ_PART(TENSOR) TENSOR(out) TENSOR(lse)

// What an attention writes, (rows, query heads, head_size), and the row of each (request, query)
#define KVQ_OUTPUT(TENSOR) TENSOR(out) TENSOR(rows)

// A step's requests, int32, the same for all layers; tables are (requests, blocks): kvq::Decode
#define KVQ_BATCH(TENSOR) TENSOR(query_start) TENSOR(seq_lens) TENSOR(table) TENSOR(side_table) TENSOR(sink_table)

// A step's new tokens: queries (tokens, query heads, head_size), and a pair
#define KVQ_FRESH(TENSOR) TENSOR(query) TENSOR(key) TENSOR(value)

// A layer's caches: records (pages, heads, bytes), and companions (blocks, elements)
#define KVQ_CACHED(TENSOR) TENSOR(pages) TENSOR(sidecar) TENSOR(sinks)

// TUPLE(name of the struct, its tensors)
#define KVQ_TUPLES(TUPLE)        \
  TUPLE(PageList, KVQ_PAGE_LIST) \
  TUPLE(Held, KVQ_HELD)          \
  TUPLE(Units, KVQ_UNITS)        \
  TUPLE(Pair, KVQ_PAIR)          \
  TUPLE(Part, KVQ_PART)          \
  TUPLE(Output, KVQ_OUTPUT)      \
  TUPLE(Batch, KVQ_BATCH)        \
  TUPLE(Fresh, KVQ_FRESH)        \
  TUPLE(Cached, KVQ_CACHED)

namespace kvq_api {

using tvm::ffi::TensorView;
using Tuple = tvm::ffi::Array<tvm::ffi::Tensor>;

inline TensorView view(const Tuple& tuple, int64_t i) {
  const tvm::ffi::Tensor tensor = tuple[i];
  return tensor;  // the tuple keeps it alive
}

#define KVQ_VIEW(name) TensorView name;
#define KVQ_NEXT(name) view(tuple, next++),
#define KVQ_ONE(name) +1
#define KVQ_TUPLE(Name, TENSORS)                                                                              \
  struct Name {                                                                                               \
    TENSORS(KVQ_VIEW)                                                                                         \
                                                                                                              \
    static Name of(const Tuple& tuple) {                                                                      \
      if (int64_t(tuple.size()) != 0 TENSORS(KVQ_ONE))                                                        \
        TVM_FFI_THROW(ValueError) << #Name " has " << 0 TENSORS(KVQ_ONE) << " tensors, not " << tuple.size(); \
      int64_t next = 0;                                                                                       \
      return {TENSORS(KVQ_NEXT)};                                                                             \
    }                                                                                                         \
  };
KVQ_TUPLES(KVQ_TUPLE)
#undef KVQ_VIEW
#undef KVQ_NEXT
#undef KVQ_ONE
#undef KVQ_TUPLE

}  // namespace kvq_api

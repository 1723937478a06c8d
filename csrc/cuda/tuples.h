// What belongs together: Python passes each of these lists as one tuple (kernels/gpu/cuda.py).
//
// Each list is written once. It generates the struct and the names that the library exports, with which
// kernels/gpu/cuda.py compares its own.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

// MEMBER(type, name); a format as the kernels are compiled for it: its layout on the CPU (read_layout), its sketches,
// transposed, and their scales
#define KVQ_BOUND(MEMBER)     \
  MEMBER(Tensor, layout)      \
  MEMBER(Tensor, inner)       \
  MEMBER(Tensor, outer)       \
  MEMBER(double, scale_inner) \
  MEMBER(double, scale_outer)

// Queries (tokens, query heads, head size) of requests [start[i], start[i + 1]), of which `longest` from the `first` on
// are attended
#define KVQ_QUERIES(MEMBER) MEMBER(Tensor, query) MEMBER(Tensor, start) MEMBER(int64_t, first) MEMBER(int64_t, longest)

// The requests' packed tokens: see kvq::Table
#define KVQ_PAGE_TABLE(MEMBER) MEMBER(Tensor, table) MEMBER(Tensor, low) MEMBER(Tensor, high)

// A part of an attention per split: (splits, tokens, query heads, head size), and the log-sum-exp of its scores
#define KVQ_PART(MEMBER) MEMBER(Tensor, out) MEMBER(Tensor, lse)

// The pool of sidecars (blocks, elements), the requests' blocks in it, and how a sidecar is cut: see kvq::Side
#define KVQ_SIDECARS(MEMBER)       \
  MEMBER(Tensor, pool)             \
  MEMBER(Tensor, table)            \
  MEMBER(int64_t, slots_per_block) \
  MEMBER(int64_t, ring)            \
  MEMBER(int64_t, ring_at)         \
  MEMBER(int64_t, state_at)        \
  MEMBER(bool, has_state)

// A step's new tokens (tokens, heads, head size)
#define KVQ_PAIR(MEMBER) MEMBER(Tensor, key) MEMBER(Tensor, value)

// TUPLE(name of the struct, its members)
#define KVQ_TUPLES(TUPLE)          \
  TUPLE(Bound, KVQ_BOUND)          \
  TUPLE(Queries, KVQ_QUERIES)      \
  TUPLE(PageTable, KVQ_PAGE_TABLE) \
  TUPLE(Part, KVQ_PART)            \
  TUPLE(Sidecars, KVQ_SIDECARS)    \
  TUPLE(Pair, KVQ_PAIR)

namespace kvq_api {

using tvm::ffi::Tensor;
using tvm::ffi::TensorView;
using Tuple = tvm::ffi::Array<tvm::ffi::Any>;

#define KVQ_MEMBER(type, name) type name;
#define KVQ_NEXT(type, name) tuple[next++].cast<type>(),
#define KVQ_ONE(type, name) +1
#define KVQ_TUPLE(Name, MEMBERS)                                                                              \
  struct Name {                                                                                               \
    MEMBERS(KVQ_MEMBER)                                                                                       \
                                                                                                              \
    static Name of(const Tuple& tuple) {                                                                      \
      if (int64_t(tuple.size()) != 0 MEMBERS(KVQ_ONE))                                                        \
        TVM_FFI_THROW(ValueError) << #Name " has " << 0 MEMBERS(KVQ_ONE) << " members, not " << tuple.size(); \
      int64_t next = 0;                                                                                       \
      return {MEMBERS(KVQ_NEXT)};                                                                             \
    }                                                                                                         \
  };
KVQ_TUPLES(KVQ_TUPLE)
#undef KVQ_MEMBER
#undef KVQ_NEXT
#undef KVQ_ONE
#undef KVQ_TUPLE

}  // namespace kvq_api

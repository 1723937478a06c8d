// Tensors as the exported functions get them: DLPack views, whose shapes and types are checked here, as plain pointers.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstring>

#include "attend.h"
#include "cpu.h"

namespace kvq_api {

using tvm::ffi::TensorView;

inline void require(bool condition, const char* what) {
  if (!condition) TVM_FFI_THROW(ValueError) << what;
}

inline bool is(const TensorView& t, int code, int bits) {
  return t.device().device_type == kDLCPU && t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

template <class T>
T* data(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

inline bool dense(const TensorView& t) {
  if (t.numel() == 0) return true;
  int64_t expected = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != expected) return false;
    expected *= t.size(i);
  }
  return true;
}

inline const int64_t* index_list(const TensorView& t, int64_t length, const char* what) {
  require(is(t, kDLInt, 64) && t.ndim() == 1 && t.size(0) == length && dense(t), what);
  return data<const int64_t>(t);
}

inline kvq::Dtype float_type(const TensorView& t) {
  if (is(t, kDLFloat, 32)) return kvq::Dtype::f32;
  if (is(t, kDLFloat, 16)) return kvq::Dtype::f16;
  require(is(t, kDLBfloat, 16), "queries, keys and values must be float32, float16 or bfloat16 on the CPU");
  return kvq::Dtype::bf16;
}

// `constants` holds, for QJL, the two scales and the transposed sketches; `pairs` PolarQuant's channel pairs.
inline kvq::Constants read_constants(const kvq::Layout& l, const TensorView& constants, const TensorView& pairs) {
  require(is(constants, kDLFloat, 32) && dense(constants), "constants must be a dense float32 tensor");
  require(is(pairs, kDLInt, 32) && dense(pairs), "pairs must be a dense int32 tensor");
  kvq::Constants c{};
  if (l.keys == kvq::Keys::sketch) {
    const int64_t inner = l.d * l.sketch_rows, outer = l.outliers * l.outer_rows;
    require(constants.numel() == 2 + inner + outer, "the sketches do not fit the layout");
    const float* p = data<const float>(constants);
    c.sketch_scale = p[0];
    c.outer_scale = p[1];
    c.sketch = p + 2;
    c.outer = c.sketch + inner;
  }
  if (l.keys == kvq::Keys::polar) {
    require(pairs.numel() == l.d, "the channel pairs do not fit the layout");
    c.pairs = data<const int32_t>(pairs);
    for (int64_t i = 0; i < l.d; ++i) require(c.pairs[i] >= 0 && c.pairs[i] < l.d, "a channel pair is out of range");
  }
  return c;
}

inline kvq::Layout read_layout(const TensorView& t) {
  require(is(t, kDLInt, 64) && dense(t) && t.numel() == kvq::LAYOUT_FIELDS, "the layout has another number of fields");
  kvq::Layout l;
  std::memcpy(&l, t.data_ptr(), sizeof l);
  require(l.d > 0 && l.d <= 256 && l.d % kvq::SLAB == 0 && l.head_size <= l.d, "unsupported head size");
  require(l.tokens > 0 && l.tokens % kvq::SLAB == 0, "unsupported page size");
  require(l.slabs_at + l.tokens / kvq::SLAB * l.slab_bytes <= l.record_bytes, "the slabs do not fit the record");
  return l;
}

// records (pages, heads, record_bytes)
inline void read_records(const TensorView& pages, const kvq::Layout& l) {
  require(is(pages, kDLUInt, 8) && pages.ndim() == 3 && pages.size(2) == l.record_bytes && pages.stride(2) == 1,
          "pages must be uint8 (pages, heads, record_bytes)");
}

// tokens (blocks, slots, heads, head_size)
inline kvq::Tokens read_tokens(const TensorView& key, const TensorView& value, int64_t heads, int64_t head_size,
                        kvq::Dtype dtype) {
  require(key.ndim() == 4 && value.ndim() == 4, "tokens must be (blocks, slots, heads, head_size)");
  kvq::Tokens t{key.data_ptr(), value.data_ptr(), key.size(0), key.size(1), {}, {}};
  for (const TensorView* x : {&key, &value})
    require(x->size(0) == t.blocks && x->size(1) == t.slots && x->size(2) == heads && x->size(3) == head_size &&
                x->stride(3) == 1 && float_type(*x) == dtype,
            "keys and values must have the same shape and type, and dense rows");
  for (int i = 0; i < 3; ++i) t.key_strides[i] = key.stride(i), t.value_strides[i] = value.stride(i);
  return t;
}

inline void require_isa(int64_t threads, int64_t isa) {
  require(threads >= 1 && isa >= 0 && isa <= kvq::best_isa(), "no such instruction set on this processor");
}

}  // namespace kvq_api

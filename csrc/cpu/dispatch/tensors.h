// Tensors as the exported functions (*/api.cpp) get them from apache-tvm-ffi: DLPack views, whose shapes and types are
// checked here, as plain pointers. A C++ exception becomes Python's.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstring>

#include "../call.h"
#include "../pages.h"
#include "../tokens.h"
#include "isa.h"
#include "tuples.h"

namespace kvq_api {

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

// A struct that Python fills by name (kernels/cpu/fields.py).
template <class Fields>
Fields read_fields(const TensorView& t) {
  require(is(t, kDLUInt, 8) && dense(t) && t.numel() >= int64_t(sizeof(Fields)),
          "fields must be dense bytes, and all of them");
  Fields f;
  std::memcpy(&f, t.data_ptr(), sizeof f);
  return f;
}

// `count` numbers of 4 bytes that follow a layout.
template <class T>
const T* read_table(const TensorView& layout, int64_t at, int64_t count) {
  static_assert(sizeof(T) == 4);
  require(at >= int64_t(sizeof(kvq::Layout)) && at % 4 == 0 && count >= 0 && at + 4 * count <= layout.numel(),
          "a table does not lie behind its layout");
  return reinterpret_cast<const T*>(data<const char>(layout) + at);
}

inline kvq::Constants read_constants(const TensorView& layout, const kvq::Layout& l) {
  kvq::Constants c{};
  if (l.keys == kvq::Keys::sketch) {
    c.sketch = read_table<float>(layout, l.sketch, l.d * l.sketch_rows);
    if (l.outliers) c.outer = read_table<float>(layout, l.outer, l.outliers * l.outer_rows);
    c.sketch_scale = float(l.sketch_scale);
    c.outer_scale = float(l.outer_scale);
  }
  if (l.keys == kvq::Keys::polar || l.keys == kvq::Keys::transformed) {
    c.pairs = read_table<int32_t>(layout, l.pairs, l.d);
    for (int64_t i = 0; i < l.d; ++i) require(c.pairs[i] >= 0 && c.pairs[i] < l.d, "a channel pair is out of range");
  }
  if (l.keys == kvq::Keys::transformed) {
    c.backward = read_table<float>(layout, l.backward, l.key_heads * l.d * l.d);
    c.forward = read_table<float>(layout, l.forward, l.key_heads * l.d * l.d);
    c.channels = read_table<float>(layout, l.channels, l.key_heads * 3 * l.d);
    c.mean = read_table<float>(layout, l.mean, l.key_heads * l.d);
    c.fine = read_table<float>(layout, l.fine, kvq::FINE * l.d);
    c.coarse = read_table<float>(layout, l.coarse, kvq::COARSE * l.d);
    c.places = read_table<int32_t>(layout, l.places, l.key_heads * 2 * l.slots);
  }
  return c;
}

inline kvq::Layout read_layout(const TensorView& t) {
  const auto l = read_fields<kvq::Layout>(t);
  require(l.bytes == t.numel(), "the layout has another size");
  require(l.d > 0 && l.d <= kvq::LARGEST_HEAD && l.d % kvq::SLAB == 0 && l.head_size <= l.d, "unsupported head size");
  require(l.tokens > 0 && l.tokens % kvq::SLAB == 0, "unsupported page size");
  const bool sketch = l.keys == kvq::Keys::sketch, polar = l.keys == kvq::Keys::polar;
  const bool transformed = l.keys == kvq::Keys::transformed;
  require(l.keys == kvq::Keys::raw || (l.key_bits >= 1 && l.key_bits <= 8), "keys have no codes");
  require(l.keys != kvq::Keys::boosted || (l.boosted > 0 && l.boosted <= l.d && l.boosted % 16 == 0 &&
                                           l.k_high == l.k_codes + 8 * l.d),
          "boosted channels have no codes");
  require(!sketch || (l.sketch_rows > 0 && l.outliers >= 0 && (l.outer_rows > 0) == (l.outliers > 0)),
          "the sketch has no rows");
  require(!polar || (l.key_bits >= 2 && l.key_bits <= 4 && (l.radius_bits == 2 || l.radius_bits == 4)),
          "angles or radii have no codes");
  require(!transformed || (l.key_bits == 2 && l.slots > 0 && l.slots <= 4 * l.d && l.slots % 16 == 0),
          "transformed keys have no codes");
  require(!transformed || l.key_heads >= 0, "there are no heads");
  require(l.values == kvq::Values::raw || (l.value_bits >= 1 && l.value_bits <= 8), "values have no codes");
  require(l.values != kvq::Values::token || l.group > 0, "values have no groups");
  require(l.values != kvq::Values::searched || (l.value_step > 0 && l.group == l.d), "values have no codes or groups");
  require(l.slabs_at + l.tokens / kvq::SLAB * l.slab_bytes <= l.record_bytes, "the slabs do not fit the record");
  return l;
}

// records (pages, heads, record_bytes)
inline kvq::Pool read_pool(const TensorView& pages, const kvq::Layout& l) {
  require(is(pages, kDLUInt, 8) && pages.ndim() == 3 && pages.size(2) == l.record_bytes && pages.stride(2) == 1,
          "pages must be uint8 (pages, heads, record_bytes)");
  if (l.keys == kvq::Keys::transformed && l.key_heads != pages.size(1))
    TVM_FFI_THROW(ValueError) << "the keys have constants of " << l.key_heads << " KV heads, but pages have "
                              << pages.size(1);
  return {data<uint8_t>(pages), pages.size(0), pages.size(1), pages.stride(0), pages.stride(1)};
}

inline kvq::PageList read_page_list(const PageList& t) {
  kvq::PageList l{};
  l.count = t.ids.numel();
  l.ids = index_list(t.ids, l.count, "page ids must be a dense int64 list");
  l.owner = index_list(t.owner, l.count, "owner must be a dense int64 list as long as the page ids");
  l.low = index_list(t.low, l.count, "low must be a dense int64 list as long as the page ids");
  l.high = index_list(t.high, l.count, "high must be a dense int64 list as long as the page ids");
  return l;
}

// tokens (blocks, slots, heads, head_size)
inline kvq::Tokens read_tokens(const Pair& pair, int64_t heads, int64_t head_size, kvq::Dtype dtype) {
  const auto& [key, value] = pair;
  require(key.ndim() == 4 && value.ndim() == 4, "tokens must be (blocks, slots, heads, head_size)");
  kvq::Tokens t{key.data_ptr(), value.data_ptr(), key.size(0), key.size(1), {}, {}};
  for (const TensorView* x : {&key, &value})
    require(x->size(0) == t.blocks && x->size(1) == t.slots && x->size(2) == heads && x->size(3) == head_size &&
                x->stride(3) == 1 && float_type(*x) == dtype,
            "keys and values must have the same shape and type, and dense rows");
  for (int i = 0; i < 3; ++i) t.key_strides[i] = key.stride(i), t.value_strides[i] = value.stride(i);
  return t;
}

inline void require_isa(int64_t isa) {
  require(isa >= 0 && isa <= kvq::best_isa(), "no such instruction set on this processor");
}

inline kvq::Team read_team(const TensorView& t) {
  const auto team = read_fields<kvq::Team>(t);
  require(team.threads >= 1, "a call needs a thread");
  require_isa(team.isa);
  return team;
}

inline kvq::Scores read_scores(const TensorView& t) {
  const auto s = read_fields<kvq::Scores>(t);
  require(s.cap >= 0, "a soft cap must be positive");
  return s;
}

}  // namespace kvq_api

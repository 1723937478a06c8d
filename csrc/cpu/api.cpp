// What Python sees, through apache-tvm-ffi: DLPack tensors in, shapes and types checked here, errors as exceptions.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstring>

#include "attend.h"
#include "cpu.h"

namespace {

using tvm::ffi::TensorView;

void require(bool condition, const char* what) {
  if (!condition) TVM_FFI_THROW(ValueError) << what;
}

bool is(const TensorView& t, int code, int bits) {
  return t.device().device_type == kDLCPU && t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

template <class T>
T* data(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

bool dense(const TensorView& t) {
  if (t.numel() == 0) return true;
  int64_t expected = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != expected) return false;
    expected *= t.size(i);
  }
  return true;
}

const int64_t* index_list(const TensorView& t, int64_t length, const char* what) {
  require(is(t, kDLInt, 64) && t.ndim() == 1 && t.size(0) == length && dense(t), what);
  return data<const int64_t>(t);
}

kvq::Dtype float_type(const TensorView& t) {
  if (is(t, kDLFloat, 32)) return kvq::Dtype::f32;
  if (is(t, kDLFloat, 16)) return kvq::Dtype::f16;
  require(is(t, kDLBfloat, 16), "query must be float32, float16 or bfloat16 on the CPU");
  return kvq::Dtype::bf16;
}

// `constants` holds, for QJL, the two scales and the transposed sketches, `sketch16` the sketches again in integers;
// `pairs` PolarQuant's channel pairs.
kvq::Constants read_constants(const kvq::Layout& l, const TensorView& constants, const TensorView& sketch16,
                              const TensorView& pairs) {
  require(is(constants, kDLFloat, 32) && dense(constants), "constants must be a dense float32 tensor");
  require(is(pairs, kDLInt, 32) && dense(pairs), "pairs must be a dense int32 tensor");
  kvq::Constants c{};
  if (l.keys == kvq::Keys::sketch) {
    const int64_t inner = l.d * l.sketch_rows, outer = l.outliers * l.outer_rows;
    require(constants.numel() == 2 + inner + outer, "the sketches do not fit the layout");
    require(is(sketch16, kDLInt, 16) && dense(sketch16) && sketch16.numel() == inner + outer, "sketch16 must be int16");
    c.sketch16 = data<const int16_t>(sketch16);
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

kvq::Layout read_layout(const TensorView& t) {
  require(is(t, kDLInt, 64) && dense(t) && t.numel() == kvq::LAYOUT_FIELDS, "the layout has another number of fields");
  kvq::Layout l;
  std::memcpy(&l, t.data_ptr(), sizeof l);
  require(l.d > 0 && l.d <= 256 && l.d % kvq::SLAB == 0 && l.head_size <= l.d, "unsupported head size");
  require(l.tokens > 0 && l.tokens % kvq::SLAB == 0, "unsupported page size");
  require(l.slabs_at + l.tokens / kvq::SLAB * l.slab_bytes <= l.record_bytes, "the slabs do not fit the record");
  return l;
}

void attend_packed(TensorView layout, TensorView constants, TensorView sketch16, TensorView pairs, TensorView query,
                   TensorView pages, TensorView page_ids, TensorView owner, TensorView low, TensorView high,
                   double scale, TensorView out, TensorView lse, int64_t threads, int64_t isa) {
  kvq::Attend a{};
  a.layout = read_layout(layout);
  a.constants = read_constants(a.layout, constants, sketch16, pairs);
  require(query.ndim() == 4 && query.size(3) == a.layout.head_size && (query.stride(3) == 1 || query.size(3) == 1),
          "query must be (requests, queries, heads, head_size) with dense rows");
  a.requests = query.size(0);
  a.queries = query.size(1);
  a.query_heads = query.size(2);
  a.query = query.data_ptr();
  a.query_dtype = float_type(query);
  for (int i = 0; i < 3; ++i) a.query_strides[i] = query.stride(i);
  require(is(pages, kDLUInt, 8) && pages.ndim() == 3 && pages.size(2) == a.layout.record_bytes && pages.stride(2) == 1,
          "pages must be uint8 (pages, heads, record_bytes)");
  a.pages = pages.size(0);
  a.heads = pages.size(1);
  a.records = data<const uint8_t>(pages);
  a.page_stride = pages.stride(0);
  a.head_stride = pages.stride(1);
  require(a.heads > 0 && a.query_heads % a.heads == 0, "query heads must be a multiple of the KV heads");
  a.listed = page_ids.numel();
  a.page_ids = index_list(page_ids, a.listed, "page_ids must be a dense int64 list");
  a.owner = index_list(owner, a.listed, "owner must be a dense int64 list as long as page_ids");
  a.low = index_list(low, a.listed, "low must be a dense int64 list as long as page_ids");
  a.high = index_list(high, a.listed, "high must be a dense int64 list as long as page_ids");
  a.scale = float(scale);
  const int64_t rows = a.requests * a.queries * a.query_heads;
  require(is(out, kDLFloat, 32) && dense(out) && out.numel() == rows * a.layout.head_size, "out has the wrong shape");
  require(is(lse, kDLFloat, 32) && dense(lse) && lse.numel() == rows, "lse has the wrong shape");
  a.out = data<float>(out);
  a.lse = data<float>(lse);
  require(threads >= 1 && isa >= 0 && isa <= kvq::best_isa(), "no such instruction set on this processor");
  a.threads = int(threads);
  a.isa = int(isa);
  try {
    kvq::attend_packed(a);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

// key and value (blocks, slots, heads, head_size); rows (requests, tokens), or empty when block i is request i
void attend_raw(TensorView query, TensorView key, TensorView value, TensorView rows, TensorView seen, double scale,
                TensorView out, TensorView lse, int64_t threads, int64_t isa) {
  kvq::AttendRaw a{};
  require(query.ndim() == 4 && key.ndim() == 4 && value.ndim() == 4 && seen.ndim() == 3, "wrong number of dimensions");
  a.requests = query.size(0);
  a.queries = query.size(1);
  a.query_heads = query.size(2);
  a.head_size = query.size(3);
  a.blocks = key.size(0);
  a.slots = key.size(1);
  a.heads = key.size(2);
  a.tokens = seen.size(2);
  a.query_dtype = float_type(query);
  a.dtype = float_type(key);
  require(a.head_size > 0 && a.head_size <= 256 && key.size(3) == a.head_size, "unsupported head size");
  require(float_type(value) == a.dtype, "keys and values must have the same type");
  for (int i = 0; i < 4; ++i) require(value.size(i) == key.size(i), "keys and values must have the same shape");
  require(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "rows must be dense");
  require(a.heads > 0 && a.query_heads % a.heads == 0, "query heads must be a multiple of the KV heads");
  for (int i = 0; i < 3; ++i) {
    a.query_strides[i] = query.stride(i);
    a.key_strides[i] = key.stride(i);
    a.value_strides[i] = value.stride(i);
  }
  require(is(seen, kDLUInt, 8) && dense(seen) && seen.size(0) == a.requests && seen.size(1) == a.queries,
          "seen must be dense bytes (requests, queries, tokens)");
  require(is(rows, kDLInt, 64) && dense(rows), "rows must be dense int64");
  if (rows.numel() || a.tokens == 0) {
    require(rows.numel() == a.requests * a.tokens, "rows must be (requests, tokens)");
    a.rows = data<const int64_t>(rows);
  } else {
    require(a.blocks == a.requests && a.slots == a.tokens, "without rows, keys must be (requests, tokens, ...)");
  }
  const int64_t lines = a.requests * a.queries * a.query_heads;
  require(is(out, kDLFloat, 32) && dense(out) && out.numel() == lines * a.head_size, "out has the wrong shape");
  require(is(lse, kDLFloat, 32) && dense(lse) && lse.numel() == lines, "lse has the wrong shape");
  require(threads >= 1 && isa >= 0 && isa <= kvq::best_isa(), "no such instruction set on this processor");
  a.query = query.data_ptr();
  a.key = key.data_ptr();
  a.value = value.data_ptr();
  a.seen = data<const uint8_t>(seen);
  a.scale = float(scale);
  a.out = data<float>(out);
  a.lse = data<float>(lse);
  a.threads = int(threads);
  a.isa = int(isa);
  try {
    kvq::attend_raw(a);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

int64_t best_isa() { return kvq::best_isa(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_packed, attend_packed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_raw, attend_raw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(best_isa, best_isa);

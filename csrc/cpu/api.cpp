// What Python sees, through apache-tvm-ffi: DLPack tensors in, shapes and types checked here, errors as exceptions.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstring>

#include "attend.h"
#include "cpu.h"
#include "pack.h"

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
  require(is(t, kDLBfloat, 16), "queries, keys and values must be float32, float16 or bfloat16 on the CPU");
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

// tokens (blocks, slots, heads, head_size)
kvq::Tokens read_tokens(const TensorView& key, const TensorView& value, int64_t heads, int64_t head_size,
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

// See kvq::AttendRaw. prior (1 or 2): out (requests, queries, heads, head_size) and lse, empty where there are none.
void attend_raw(TensorView query, TensorView key, TensorView value, TensorView more_key, TensorView more_value,
                TensorView rows, TensorView seen, double scale, TensorView out0, TensorView lse0, TensorView out1,
                TensorView lse1, TensorView out, TensorView out_rows, TensorView lse, int64_t threads, int64_t isa) {
  kvq::AttendRaw a{};
  require(query.ndim() == 4 && key.ndim() == 4 && seen.ndim() == 3 && out.ndim() == 3, "wrong number of dimensions");
  a.requests = query.size(0);
  a.queries = query.size(1);
  a.query_heads = query.size(2);
  a.head_size = query.size(3);
  a.heads = key.size(2);
  a.tokens = seen.size(2);
  a.query_dtype = float_type(query);
  a.dtype = float_type(key);
  require(a.head_size > 0 && a.head_size <= 256 && a.head_size % 16 == 0, "unsupported head size");
  require(query.stride(3) == 1, "rows must be dense");
  require(a.heads > 0 && a.query_heads % a.heads == 0, "query heads must be a multiple of the KV heads");
  for (int i = 0; i < 3; ++i) a.query_strides[i] = query.stride(i);
  a.pool = read_tokens(key, value, a.heads, a.head_size, a.dtype);
  a.more = read_tokens(more_key, more_value, a.heads, a.head_size, a.dtype);
  require(is(seen, kDLUInt, 8) && dense(seen) && seen.size(0) == a.requests && seen.size(1) == a.queries,
          "seen must be dense bytes (requests, queries, tokens)");
  require(is(rows, kDLInt, 64) && dense(rows) && rows.numel() == a.requests * a.tokens,
          "rows must be dense int64 (requests, tokens)");
  a.rows = data<const int64_t>(rows);
  const int64_t lines = a.requests * a.queries * a.query_heads;
  const TensorView *outs[2] = {&out0, &out1}, *lses[2] = {&lse0, &lse1};
  for (int i = 0; i < 2; ++i) {
    if (outs[i]->numel() == 0) continue;
    require(is(*outs[i], kDLFloat, 32) && dense(*outs[i]) && outs[i]->numel() == lines * a.head_size &&
                is(*lses[i], kDLFloat, 32) && dense(*lses[i]) && lses[i]->numel() == lines,
            "a prior part has the wrong shape");
    a.prior_out[i] = data<const float>(*outs[i]);
    a.prior_lse[i] = data<const float>(*lses[i]);
  }
  require(out.size(1) == a.query_heads && out.size(2) == a.head_size && out.stride(2) == 1, "out has the wrong shape");
  a.out = out.data_ptr();
  a.out_dtype = float_type(out);
  a.out_count = out.size(0);
  a.out_strides[0] = out.stride(0);
  a.out_strides[1] = out.stride(1);
  require(is(out_rows, kDLInt, 64) && dense(out_rows) && out_rows.numel() == a.requests * a.queries,
          "out_rows must be dense int64 (requests, queries)");
  a.out_rows = data<const int64_t>(out_rows);
  if (lse.numel()) {
    require(is(lse, kDLFloat, 32) && dense(lse) && lse.numel() == lines, "lse has the wrong shape");
    a.lse = data<float>(lse);
  }
  require(threads >= 1 && isa >= 0 && isa <= kvq::best_isa(), "no such instruction set on this processor");
  a.query = query.data_ptr();
  a.seen = data<const uint8_t>(seen);
  a.scale = float(scale);
  a.threads = int(threads);
  a.isa = int(isa);
  try {
    kvq::attend_raw(a);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

// Rows of the pool (to_key, to_value) get new tokens' rows.
void store_tokens(TensorView to_key, TensorView to_value, TensorView rows, TensorView key, TensorView value,
                  TensorView source) {
  kvq::Store s{};
  require(to_key.ndim() == 4, "tokens must be (blocks, slots, heads, head_size)");
  s.heads = to_key.size(2);
  s.head_size = to_key.size(3);
  s.dtype = float_type(to_key);
  s.to = read_tokens(to_key, to_value, s.heads, s.head_size, s.dtype);
  s.from = read_tokens(key, value, s.heads, s.head_size, s.dtype);
  s.count = rows.numel();
  s.rows = index_list(rows, s.count, "rows must be a dense int64 list");
  s.source = index_list(source, s.count, "source must be a dense int64 list as long as rows");
  try {
    kvq::store(s);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

// Index in the list of the first page with an unpacked slab among its attended ones, or -1.
int64_t unpacked_page(TensorView layout, TensorView pages, TensorView page_ids, TensorView low, TensorView high) {
  const kvq::Layout l = read_layout(layout);
  require(is(pages, kDLUInt, 8) && pages.ndim() == 3 && pages.size(2) == l.record_bytes && pages.stride(2) == 1,
          "pages must be uint8 (pages, heads, record_bytes)");
  const int64_t n = page_ids.numel();
  const int64_t* ids = index_list(page_ids, n, "page_ids must be a dense int64 list");
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] < 0 || ids[i] >= pages.size(0)) TVM_FFI_THROW(IndexError) << "page id " << ids[i] << " is out of range";
  return kvq::unpacked_page(l, data<const uint8_t>(pages), pages.stride(0), n, ids,
                            index_list(low, n, "low must be a dense int64 list as long as page_ids"),
                            index_list(high, n, "high must be a dense int64 list as long as page_ids"));
}

// Units (see kvq::Pack); `state` (owners, heads, state_rows, d) float32, empty without one. Returns replaced elements.
int64_t pack(TensorView layout, TensorView constants, TensorView sketch16, TensorView pairs, TensorView pages,
             TensorView page, TensorView unit, TensorView rows, TensorView owner, TensorView follows,
             TensorView old_key, TensorView old_value, TensorView key, TensorView value, TensorView state,
             double lambda, int64_t block, int64_t threads, int64_t isa) {
  kvq::Pack p{};
  p.layout = read_layout(layout);
  p.constants = read_constants(p.layout, constants, sketch16, pairs);
  require(is(pages, kDLUInt, 8) && pages.ndim() == 3 && pages.size(2) == p.layout.record_bytes && pages.stride(2) == 1,
          "pages must be uint8 (pages, heads, record_bytes)");
  p.records = data<uint8_t>(pages);
  p.pages = pages.size(0);
  p.heads = pages.size(1);
  p.page_stride = pages.stride(0);
  p.head_stride = pages.stride(1);
  p.units = page.numel();
  p.unit_tokens = p.layout.keys == kvq::Keys::polar ? p.layout.tokens : kvq::SLAB;
  p.page = index_list(page, p.units, "page must be a dense int64 list");
  p.unit = index_list(unit, p.units, "unit must be a dense int64 list as long as page");
  p.owner = index_list(owner, p.units, "owner must be a dense int64 list as long as page");
  require(is(rows, kDLInt, 64) && dense(rows) && rows.numel() == p.units * p.unit_tokens,
          "rows must be dense int64 (units, tokens of a unit)");
  p.rows = data<const int64_t>(rows);
  require(is(follows, kDLUInt, 8) && dense(follows) && follows.numel() == p.units, "follows must be dense bytes");
  p.follows = data<const uint8_t>(follows);
  p.dtype = float_type(key);
  p.old = read_tokens(old_key, old_value, p.heads, p.layout.head_size, p.dtype);
  p.fresh = read_tokens(key, value, p.heads, p.layout.head_size, p.dtype);
  if (state.numel()) {
    require(is(state, kDLFloat, 32) && state.ndim() == 4 && dense(state) && state.size(1) == p.heads &&
                state.size(3) == p.layout.d,
            "state must be dense float32 (owners, heads, rows, d)");
    p.state = data<const float>(state);
    p.owners = state.size(0);
    p.state_rows = state.size(2);
  }
  p.lambda = lambda;
  p.block = block;
  require(threads >= 1 && isa >= 0 && isa <= kvq::best_isa(), "no such instruction set on this processor");
  p.threads = int(threads);
  p.isa = int(isa);
  try {
    return kvq::pack(p);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

// rows (tokens, query heads, head_size); out (KV heads, d, d) float64: Gram matrices, or (KV heads, d) float32: the
// largest magnitudes
void reduce_rows(TensorView rows, TensorView out, int64_t threads, int64_t isa) {
  kvq::Reduce r{};
  require(rows.ndim() == 3 && rows.stride(2) == 1 && out.ndim() >= 2 && dense(out), "rows must be dense");
  r.tokens = rows.size(0);
  r.head_size = rows.size(2);
  r.heads = out.size(0);
  r.d = out.size(1);
  require(r.heads > 0 && rows.size(1) % r.heads == 0, "rows must belong to a multiple of the KV heads");
  require(r.d > 0 && r.d <= 256 && r.d % kvq::SLAB == 0 && r.head_size <= r.d && r.head_size % 16 == 0,
          "unsupported head size");
  r.group = rows.size(1) / r.heads;
  r.rows = rows.data_ptr();
  r.dtype = float_type(rows);
  r.strides[0] = rows.stride(0);
  r.strides[1] = rows.stride(1);
  require(threads >= 1 && isa >= 0 && isa <= kvq::best_isa(), "no such instruction set on this processor");
  r.threads = int(threads);
  r.isa = int(isa);
  if (out.ndim() == 3) {
    require(is(out, kDLFloat, 64) && out.size(2) == r.d, "Gram matrices are float64 (heads, d, d)");
    r.gram = data<double>(out);
    kvq::gram(r);
  } else {
    require(is(out, kDLFloat, 32) && out.ndim() == 2, "magnitudes are float32 (heads, d)");
    r.top = data<float>(out);
    kvq::largest(r);
  }
}

int64_t best_isa() { return kvq::best_isa(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_packed, attend_packed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_raw, attend_raw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_tokens, store_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpacked_page, unpacked_page);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reduce_rows, reduce_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(best_isa, best_isa);

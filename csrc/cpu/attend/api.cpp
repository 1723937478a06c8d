// Attention as Python sees it.
#include "attend.h"
#include "../pack/pack.h"
#include "../dispatch/tensors.h"

namespace {

using namespace kvq_api;

void read_threads(kvq::Attend& a, int64_t threads, int64_t isa) {
  require_isa(threads, isa);
  a.threads = int(threads);
  a.isa = int(isa);
}

void read_query(kvq::Attend& a, const TensorView& query, int64_t heads, double scale, double cap) {
  require(query.ndim() == 4 && (query.stride(3) == 1 || query.size(3) == 1),
          "query must be (requests, queries, heads, head_size) with dense rows");
  a.requests = query.size(0);
  a.queries = query.size(1);
  a.query_heads = query.size(2);
  a.head_size = query.size(3);
  a.heads = heads;
  require(a.head_size > 0 && a.head_size <= kvq::LARGEST_HEAD && a.head_size % 16 == 0, "unsupported head size");
  require(heads > 0 && a.query_heads % heads == 0, "query heads must be a multiple of the KV heads");
  a.query = query.data_ptr();
  a.query_dtype = float_type(query);
  for (int i = 0; i < 3; ++i) a.query_strides[i] = query.stride(i);
  a.scale = float(scale);
  require(cap >= 0, "a soft cap must be positive");
  a.cap = float(cap);
}

void read_packed(kvq::Attend& a, const TensorView& layout, const TensorView& pages, const TensorView& page_ids,
                 const TensorView& owner, const TensorView& low, const TensorView& high) {
  kvq::Packed& p = a.packed;
  p.layout = read_layout(layout);
  p.constants = read_constants(layout, p.layout);
  read_records(pages, p.layout);
  require(pages.size(1) == a.heads && p.layout.head_size == a.head_size, "pages and queries have different heads");
  p.pages = pages.size(0);
  p.records = data<const uint8_t>(pages);
  p.page_stride = pages.stride(0);
  p.head_stride = pages.stride(1);
  p.listed = page_ids.numel();
  p.page_ids = index_list(page_ids, p.listed, "page_ids must be a dense int64 list");
  p.owner = index_list(owner, p.listed, "owner must be a dense int64 list as long as page_ids");
  p.low = index_list(low, p.listed, "low must be a dense int64 list as long as page_ids");
  p.high = index_list(high, p.listed, "high must be a dense int64 list as long as page_ids");
}

void read_dense_output(kvq::Attend& a, const TensorView& out, const TensorView& lse) {
  const int64_t lines = a.requests * a.queries * a.query_heads;
  require(is(out, kDLFloat, 32) && dense(out) && out.numel() == lines * a.head_size, "out has the wrong shape");
  require(is(lse, kDLFloat, 32) && dense(lse) && lse.numel() == lines, "lse has the wrong shape");
  a.out = out.data_ptr();
  a.out_dtype = kvq::Dtype::f32;
  a.out_strides[0] = a.query_heads * a.head_size;
  a.out_strides[1] = a.head_size;
  a.lse = data<float>(lse);
}

void run(const kvq::Attend& a) {
  try {
    kvq::attend(a);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

void attend_packed(TensorView layout, TensorView query, TensorView pages, TensorView page_ids, TensorView owner,
                   TensorView low, TensorView high, double scale, double cap, TensorView out, TensorView lse,
                   int64_t threads, int64_t isa) {
  kvq::Attend a{};
  read_threads(a, threads, isa);
  read_query(a, query, pages.ndim() == 3 ? pages.size(1) : 0, scale, cap);
  read_packed(a, layout, pages, page_ids, owner, low, high);
  read_dense_output(a, out, lse);
  run(a);
}

void read_raw(kvq::Attend& a, const TensorView& key, const TensorView& value, const TensorView& more_key,
              const TensorView& more_value, const TensorView& rows, const TensorView& seen) {
  require(key.ndim() == 4 && seen.ndim() == 3, "wrong number of dimensions");
  kvq::Raw& r = a.raw;
  r.dtype = float_type(key);
  r.pool = read_tokens(key, value, a.heads, a.head_size, r.dtype);
  r.more = read_tokens(more_key, more_value, a.heads, a.head_size, r.dtype);
  r.tokens = seen.size(2);
  require(is(seen, kDLUInt, 8) && dense(seen) && seen.size(0) == a.requests && seen.size(1) == a.queries,
          "seen must be dense bytes (requests, queries, tokens)");
  require(is(rows, kDLInt, 64) && dense(rows) && rows.numel() == a.requests * r.tokens,
          "rows must be dense int64 (requests, tokens)");
  r.rows = data<const int64_t>(rows);
  r.seen = data<const uint8_t>(seen);
}

// out (rows, query heads, head_size) of any float type; out_rows (requests, queries)
void read_output(kvq::Attend& a, const TensorView& out, const TensorView& out_rows) {
  require(out.ndim() == 3 && out.size(1) == a.query_heads && out.size(2) == a.head_size && out.stride(2) == 1,
          "out has the wrong shape");
  a.out = out.data_ptr();
  a.out_dtype = float_type(out);
  a.out_count = out.size(0);
  a.out_strides[0] = out.stride(0);
  a.out_strides[1] = out.stride(1);
  require(is(out_rows, kDLInt, 64) && dense(out_rows) && out_rows.numel() == a.requests * a.queries,
          "out_rows must be dense int64 (requests, queries)");
  a.out_rows = data<const int64_t>(out_rows);
}

// Full-precision tokens, merged with up to two prior parts: out (requests, queries, heads, head_size) and lse, empty
// where there are none.
void attend_raw(TensorView query, TensorView key, TensorView value, TensorView more_key, TensorView more_value,
                TensorView rows, TensorView seen, double scale, double cap, TensorView out0, TensorView lse0,
                TensorView out1, TensorView lse1, TensorView out, TensorView out_rows, TensorView lse, int64_t threads,
                int64_t isa) {
  kvq::Attend a{};
  read_threads(a, threads, isa);
  read_query(a, query, key.ndim() == 4 ? key.size(2) : 0, scale, cap);
  read_raw(a, key, value, more_key, more_value, rows, seen);
  read_output(a, out, out_rows);
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
  if (lse.numel()) {
    require(is(lse, kDLFloat, 32) && dense(lse) && lse.numel() == lines, "lse has the wrong shape");
    a.lse = data<float>(lse);
  }
  run(a);
}

int64_t first_unpacked(const kvq::Packed& p) {
  for (int64_t i = 0; i < p.listed; ++i)
    if (p.page_ids[i] < 0 || p.page_ids[i] >= p.pages)
      TVM_FFI_THROW(IndexError) << "page id " << p.page_ids[i] << " is not one of " << p.pages << " pages";
  return kvq::unpacked_page(p.layout, p.records, p.page_stride, p.listed, p.page_ids, p.low, p.high);
}

// A decode step: packed pages and full-precision tokens at once. Returns the index in the list of a page that has an
// unpacked slab among its attended ones, and then does nothing; or -1.
int64_t attend_step(TensorView layout, TensorView query, TensorView pages, TensorView page_ids, TensorView owner,
                    TensorView low, TensorView high, TensorView key, TensorView value, TensorView more_key,
                    TensorView more_value, TensorView rows, TensorView seen, double scale, double cap, TensorView out,
                    TensorView out_rows, int64_t threads, int64_t isa) {
  kvq::Attend a{};
  read_threads(a, threads, isa);
  read_query(a, query, key.ndim() == 4 ? key.size(2) : 0, scale, cap);
  read_packed(a, layout, pages, page_ids, owner, low, high);
  read_raw(a, key, value, more_key, more_value, rows, seen);
  read_output(a, out, out_rows);
  const int64_t unpacked = first_unpacked(a.packed);
  if (unpacked < 0) run(a);
  return unpacked;
}

// Index in the list of the first page with an unpacked slab among its attended ones, or -1.
int64_t unpacked_page(TensorView layout, TensorView pages, TensorView page_ids, TensorView low, TensorView high) {
  kvq::Packed p{};
  p.layout = read_layout(layout);
  read_records(pages, p.layout);
  p.pages = pages.size(0);
  p.records = data<const uint8_t>(pages);
  p.page_stride = pages.stride(0);
  p.listed = page_ids.numel();
  p.page_ids = index_list(page_ids, p.listed, "page_ids must be a dense int64 list");
  p.low = index_list(low, p.listed, "low must be a dense int64 list as long as page_ids");
  p.high = index_list(high, p.listed, "high must be a dense int64 list as long as page_ids");
  return first_unpacked(p);
}

// Which halves of such pages integer kernels attend: 1 keys, 2 values, 3 both. The float32 kernels serve the rest.
int64_t integer_halves(TensorView layout, int64_t isa) {
  require_isa(1, isa);
  const kvq::Layout l = read_layout(layout);
  const kvq::AttendKernels& kernels = kvq::isa(int(isa)).attend;
  return int(kernels.keys(l, 1).integer) + 2 * int(kernels.values(l, 1).integer);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_packed, attend_packed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_raw, attend_raw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_step, attend_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpacked_page, unpacked_page);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(integer_halves, integer_halves);

// Attention as Python sees it.
#include "attend.h"
#include "../pack/pack.h"
#include "../dispatch/tensors.h"

namespace {

using namespace kvq_api;

void read_query(kvq::Attend& a, const TensorView& query, int64_t heads) {
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
}

void read_lse(kvq::Attend& a, const TensorView& lse) {
  require(is(lse, kDLFloat, 32) && dense(lse) && lse.numel() == a.requests * a.queries * a.query_heads,
          "lse has the wrong shape");
  a.lse = data<float>(lse);
}

void read_packed(kvq::Attend& a, const TensorView& layout, const TensorView& pages, const PageList& list) {
  kvq::Packed& p = a.packed;
  p.layout = read_layout(layout);
  p.constants = read_constants(layout, p.layout);
  p.pool = read_pool(pages, p.layout);
  require(p.pool.heads == a.heads && p.layout.head_size == a.head_size, "pages and queries have different heads");
  p.list = read_page_list(list);
}

// dense
void read_dense_output(kvq::Attend& a, const Part& into) {
  const int64_t lines = a.requests * a.queries * a.query_heads;
  require(is(into.out, kDLFloat, 32) && dense(into.out) && into.out.numel() == lines * a.head_size,
          "out has the wrong shape");
  a.out = into.out.data_ptr();
  a.out_dtype = kvq::Dtype::f32;
  a.out_strides[0] = a.query_heads * a.head_size;
  a.out_strides[1] = a.head_size;
  read_lse(a, into.lse);
}

void run(const kvq::Attend& a) {
  try {
    kvq::attend(a);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

void attend_packed(TensorView layout, TensorView query, TensorView pages, Tuple list, TensorView scores, Tuple into,
                   TensorView team) {
  kvq::Attend a{};
  a.team = read_team(team);
  a.scores = read_scores(scores);
  read_query(a, query, pages.ndim() == 3 ? pages.size(1) : 0);
  read_packed(a, layout, pages, PageList::of(list));
  read_dense_output(a, Part::of(into));
  run(a);
}

void read_raw(kvq::Attend& a, const Held& held) {
  require(held.key.ndim() == 4 && held.seen.ndim() == 3, "wrong number of dimensions");
  kvq::Raw& r = a.raw;
  r.dtype = float_type(held.key);
  r.pool = read_tokens({held.key, held.value}, a.heads, a.head_size, r.dtype);
  r.more = read_tokens({held.more_key, held.more_value}, a.heads, a.head_size, r.dtype);
  r.tokens = held.seen.size(2);
  require(is(held.seen, kDLUInt, 8) && dense(held.seen) && held.seen.size(0) == a.requests &&
              held.seen.size(1) == a.queries,
          "seen must be dense bytes (requests, queries, tokens)");
  require(is(held.rows, kDLInt, 64) && dense(held.rows) && held.rows.numel() == a.requests * r.tokens,
          "rows must be dense int64 (requests, tokens)");
  r.rows = data<const int64_t>(held.rows);
  r.seen = data<const uint8_t>(held.seen);
}

// of any float type
void read_output(kvq::Attend& a, const Output& output) {
  const auto& [out, rows] = output;
  require(out.ndim() == 3 && out.size(1) == a.query_heads && out.size(2) == a.head_size && out.stride(2) == 1,
          "out has the wrong shape");
  a.out = out.data_ptr();
  a.out_dtype = float_type(out);
  a.out_count = out.size(0);
  a.out_strides[0] = out.stride(0);
  a.out_strides[1] = out.stride(1);
  require(is(rows, kDLInt, 64) && dense(rows) && rows.numel() == a.requests * a.queries,
          "output rows must be dense int64 (requests, queries)");
  a.out_rows = data<const int64_t>(rows);
}

void read_prior(kvq::Attend& a, const tvm::ffi::Array<Tuple>& parts) {
  const int64_t lines = a.requests * a.queries * a.query_heads;
  require(parts.size() <= 2, "at most two other parts are merged");
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part part = Part::of(parts[i]);
    require(is(part.out, kDLFloat, 32) && dense(part.out) && part.out.numel() == lines * a.head_size &&
                is(part.lse, kDLFloat, 32) && dense(part.lse) && part.lse.numel() == lines,
            "a prior part has the wrong shape");
    a.prior_out[i] = data<const float>(part.out);
    a.prior_lse[i] = data<const float>(part.lse);
  }
}

// Full-precision tokens, merged with up to two prior parts; lse is empty where it is not wanted.
void attend_raw(TensorView query, Tuple held, TensorView scores, tvm::ffi::Array<Tuple> prior, Tuple output,
                TensorView lse, TensorView team) {
  kvq::Attend a{};
  a.team = read_team(team);
  a.scores = read_scores(scores);
  const Held tokens = Held::of(held);
  read_query(a, query, tokens.key.ndim() == 4 ? tokens.key.size(2) : 0);
  read_raw(a, tokens);
  read_output(a, Output::of(output));
  read_prior(a, prior);
  if (lse.numel()) read_lse(a, lse);
  run(a);
}

int64_t first_unpacked(const kvq::Layout& layout, const kvq::Pool& pool, const kvq::PageList& list) {
  for (int64_t i = 0; i < list.count; ++i)
    if (list.ids[i] < 0 || list.ids[i] >= pool.pages)
      TVM_FFI_THROW(IndexError) << "page id " << list.ids[i] << " is not one of " << pool.pages << " pages";
  return kvq::unpacked_page(layout, pool, list);
}

// A decode step: packed pages and full-precision tokens at once. Returns the index in the list of a page that has an
// unpacked slab among its attended ones, and then does nothing; or -1.
int64_t attend_step(TensorView layout, TensorView query, TensorView pages, Tuple list, Tuple held, TensorView scores,
                    Tuple output, TensorView team) {
  kvq::Attend a{};
  a.team = read_team(team);
  a.scores = read_scores(scores);
  const Held tokens = Held::of(held);
  read_query(a, query, tokens.key.ndim() == 4 ? tokens.key.size(2) : 0);
  read_packed(a, layout, pages, PageList::of(list));
  read_raw(a, tokens);
  read_output(a, Output::of(output));
  const int64_t unpacked = first_unpacked(a.packed.layout, a.packed.pool, a.packed.list);
  if (unpacked < 0) run(a);
  return unpacked;
}

// Index in the list of the first page with an unpacked slab among its attended ones, or -1.
int64_t unpacked_page(TensorView layout, TensorView pages, Tuple list) {
  const kvq::Layout l = read_layout(layout);
  return first_unpacked(l, read_pool(pages, l), read_page_list(PageList::of(list)));
}

// Which halves of such pages integer kernels attend: 1 keys, 2 values, 3 both. The float32 kernels serve the rest.
int64_t integer_halves(TensorView layout, int64_t isa) {
  require_isa(isa);
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

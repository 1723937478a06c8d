// Packing, storing and fitting as Python sees them.
#include "../dispatch/tensors.h"
#include "fit.h"
#include "pack.h"

namespace {

using namespace kvq_api;

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

// Units (see kvq::Pack); `state` (owners, heads, state_rows, d) float32, empty without one. Returns replaced elements.
int64_t pack(TensorView layout, TensorView pages, TensorView page, TensorView unit, TensorView rows, TensorView owner,
             TensorView follows, TensorView old_key, TensorView old_value, TensorView key, TensorView value,
             TensorView state, int64_t threads, int64_t isa) {
  kvq::Pack p{};
  p.layout = read_layout(layout);
  p.constants = read_constants(layout, p.layout);
  read_records(pages, p.layout);
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
  require_isa(threads, isa);
  p.threads = int(threads);
  p.isa = int(isa);
  try {
    return kvq::pack(p);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

// rows (tokens, query heads, head_size); out (KV heads, d, ...) of `bits` bits per number
kvq::Reduce read_reduce(const TensorView& rows, const TensorView& out, int dimensions, int bits, int64_t threads,
                        int64_t isa) {
  kvq::Reduce r{};
  require(rows.ndim() == 3 && rows.stride(2) == 1, "rows must be (tokens, heads, head_size), and dense");
  require(is(out, kDLFloat, bits) && out.ndim() == dimensions && dense(out), "out has the wrong shape or type");
  r.tokens = rows.size(0);
  r.head_size = rows.size(2);
  r.heads = out.size(0);
  r.d = out.size(1);
  require(r.heads > 0 && rows.size(1) % r.heads == 0, "rows must belong to a multiple of the KV heads");
  require(r.d > 0 && r.d <= kvq::LARGEST_HEAD && r.d % kvq::SLAB == 0 && r.head_size <= r.d && r.head_size % 16 == 0,
          "unsupported head size");
  r.group = rows.size(1) / r.heads;
  r.rows = rows.data_ptr();
  r.dtype = float_type(rows);
  r.strides[0] = rows.stride(0);
  r.strides[1] = rows.stride(1);
  require_isa(threads, isa);
  r.threads = int(threads);
  r.isa = int(isa);
  return r;
}

// out (KV heads, d, d) float64
void gram(TensorView rows, TensorView out, int64_t threads, int64_t isa) {
  kvq::Reduce r = read_reduce(rows, out, 3, 64, threads, isa);
  require(out.size(2) == r.d, "Gram matrices are square");
  r.sums = data<double>(out);
  kvq::gram(r);
}

// out (KV heads, d) float64
void squares(TensorView rows, TensorView out, int64_t threads, int64_t isa) {
  kvq::Reduce r = read_reduce(rows, out, 2, 64, threads, isa);
  r.sums = data<double>(out);
  kvq::squares(r);
}

// out (KV heads, d) float32
void largest(TensorView rows, TensorView out, int64_t threads, int64_t isa) {
  kvq::Reduce r = read_reduce(rows, out, 2, 32, threads, isa);
  r.top = data<float>(out);
  kvq::largest(r);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_tokens, store_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gram, gram);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(squares, squares);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(largest, largest);

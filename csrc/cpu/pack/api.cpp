// Packing, storing and fitting as Python sees them.
#include "../dispatch/tensors.h"
#include "fit.h"
#include "pack.h"

namespace {

using namespace kvq_api;

// Rows of a pool get new tokens' rows.
void store_tokens(Tuple to, TensorView rows, Tuple from, TensorView source) {
  kvq::Store s{};
  const Pair pool = Pair::of(to);
  require(pool.key.ndim() == 4, "tokens must be (blocks, slots, heads, head_size)");
  s.heads = pool.key.size(2);
  s.head_size = pool.key.size(3);
  s.dtype = float_type(pool.key);
  s.to = read_tokens(pool, s.heads, s.head_size, s.dtype);
  s.from = read_tokens(Pair::of(from), s.heads, s.head_size, s.dtype);
  s.count = rows.numel();
  s.rows = index_list(rows, s.count, "rows must be a dense int64 list");
  s.source = index_list(source, s.count, "source must be a dense int64 list as long as rows");
  try {
    kvq::store(s);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

kvq::Units read_units(const Units& t, int64_t tokens) {
  kvq::Units u{};
  u.count = t.page.numel();
  u.tokens = tokens;
  u.page = index_list(t.page, u.count, "page must be a dense int64 list");
  u.unit = index_list(t.unit, u.count, "unit must be a dense int64 list as long as page");
  u.owner = index_list(t.owner, u.count, "owner must be a dense int64 list as long as page");
  require(is(t.rows, kDLInt, 64) && dense(t.rows) && t.rows.numel() == u.count * tokens,
          "rows must be dense int64 (units, tokens of a unit)");
  u.rows = data<const int64_t>(t.rows);
  require(is(t.follows, kDLUInt, 8) && dense(t.follows) && t.follows.numel() == u.count, "follows must be dense bytes");
  u.follows = data<const uint8_t>(t.follows);
  u.position = index_list(t.position, u.count, "position must be a dense int64 list as long as page");
  return u;
}

// `state` (owners, heads, state_rows, d) float32, empty without one. Returns replaced elements.
int64_t pack(TensorView layout, TensorView pages, Tuple units, Tuple old, Tuple fresh, TensorView state,
             TensorView team) {
  kvq::Pack p{};
  p.layout = read_layout(layout);
  p.constants = read_constants(layout, p.layout);
  p.pool = read_pool(pages, p.layout);
  p.units = read_units(Units::of(units), p.layout.keys == kvq::Keys::polar ? p.layout.tokens : kvq::SLAB);
  const Pair tokens = Pair::of(fresh);
  p.dtype = float_type(tokens.key);
  p.old = read_tokens(Pair::of(old), p.pool.heads, p.layout.head_size, p.dtype);
  p.fresh = read_tokens(tokens, p.pool.heads, p.layout.head_size, p.dtype);
  if (state.numel()) {
    require(is(state, kDLFloat, 32) && state.ndim() == 4 && dense(state) && state.size(1) == p.pool.heads &&
                state.size(3) == p.layout.d,
            "state must be dense float32 (owners, heads, rows, d)");
    p.state = data<const float>(state);
    p.owners = state.size(0);
    p.state_rows = state.size(2);
  }
  p.team = read_team(team);
  try {
    return kvq::pack(p);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  }
}

// rows (tokens, query heads, head_size); out (KV heads, d, ...) of `bits` bits per number
kvq::Reduce read_reduce(const TensorView& rows, const TensorView& out, int dimensions, int bits,
                        const TensorView& team) {
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
  r.team = read_team(team);
  return r;
}

// out (KV heads, d, d) float64
void gram(TensorView rows, TensorView out, TensorView team) {
  kvq::Reduce r = read_reduce(rows, out, 3, 64, team);
  require(out.size(2) == r.d, "Gram matrices are square");
  r.sums = data<double>(out);
  kvq::gram(r);
}

// out (KV heads, d) float64
void squares(TensorView rows, TensorView out, TensorView team) {
  kvq::Reduce r = read_reduce(rows, out, 2, 64, team);
  r.sums = data<double>(out);
  kvq::squares(r);
}

// out (KV heads, d) float32
void largest(TensorView rows, TensorView out, TensorView team) {
  kvq::Reduce r = read_reduce(rows, out, 2, 32, team);
  r.top = data<float>(out);
  kvq::largest(r);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_tokens, store_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gram, gram);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(squares, squares);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(largest, largest);

// A layer's decode step as Python sees it.
#include "decode.h"
#include "../dispatch/tensors.h"

namespace {

using namespace kvq_api;

const int32_t* ints(const TensorView& t, int64_t at_least, const char* what) {
  require(is(t, kDLInt, 32) && t.ndim() == 1 && t.size(0) >= at_least && dense(t), what);
  return data<const int32_t>(t);
}

// (requests, blocks), any row stride; a table that the format does not need may be empty
kvq::Table read_block_table(const TensorView& t, int64_t requests) {
  if (t.numel() == 0) return {nullptr, 0, 0};
  require(is(t, kDLInt, 32) && t.ndim() == 2 && t.size(0) >= requests && (t.stride(1) == 1 || t.size(1) == 1),
          "block tables must be int32 (requests, blocks) with dense rows");
  return {data<const int32_t>(t), t.stride(0), t.size(1)};
}

// The slots of companions: (blocks, elements), laid out as in kernels/slots.py.
kvq::Tokens read_slots(const TensorView& pool, const kvq::Decode& d) {
  if (pool.numel() == 0) return {};
  const int64_t row = d.heads * d.layout.head_size, size = d.dtype == kvq::Dtype::f32 ? 4 : 2;
  require(pool.ndim() == 2 && pool.stride(1) == 1 && float_type(pool) == d.dtype &&
              pool.size(1) >= d.cut.slots_per_block * 2 * row,
          "companions must be (blocks, elements) of the model's type, with room for their slots");
  char* base = data<char>(pool);
  // clang-format off
  return {base, base + row * size, pool.size(0), d.cut.slots_per_block, {pool.stride(0), 2 * row, d.layout.head_size},
          {pool.stride(0), 2 * row, d.layout.head_size}};
  // clang-format on
}

kvq::Companions read_companions(const TensorView& t, const kvq::Layout& l) {
  const auto c = read_fields<kvq::Companions>(t);
  const int64_t unit = l.keys == kvq::Keys::polar ? l.tokens : kvq::SLAB;
  require(c.unit == unit && c.window % unit == 0 && c.sinks >= 0 && c.drafts >= 0, "the window does not fit the layout");
  require(c.slots_per_block > 0 && c.ring >= c.window + c.unit + c.drafts &&
              c.blocks * c.slots_per_block >= c.ring_at + c.ring,
          "the sidecar has no room for its ring");
  return c;
}

// query (tokens, query heads, head_size), key and value (tokens, 1, heads, head_size), out as query. Without keys and
// values, (0, 1, heads, head_size), another layer has updated the caches.
int64_t decode_step(TensorView layout, TensorView cut, TensorView query_start, TensorView seq_lens, TensorView table,
                    TensorView side_table, TensorView sink_table, TensorView query, TensorView key, TensorView value,
                    TensorView pages, TensorView side, TensorView sinks, TensorView out, double scale, double cap,
                    int64_t threads, int64_t isa) {
  kvq::Decode d{};
  d.layout = read_layout(layout);
  d.constants = read_constants(layout, d.layout);
  d.cut = read_companions(cut, d.layout);
  d.requests = seq_lens.numel();
  d.query_start = ints(query_start, d.requests + 1, "query_start must be dense int32, one longer than seq_lens");
  d.seq_lens = ints(seq_lens, d.requests, "seq_lens must be dense int32");
  d.pages_of = read_block_table(table, d.requests);
  d.side_of = read_block_table(side_table, d.requests);
  d.sinks_of = read_block_table(sink_table, d.requests);

  read_records(pages, d.layout);
  d.records = data<uint8_t>(pages);
  d.pages = pages.size(0);
  d.heads = pages.size(1);
  d.page_stride = pages.stride(0);
  d.head_stride = pages.stride(1);
  require(query.ndim() == 3 && query.stride(2) == 1 && query.size(2) == d.layout.head_size && d.heads > 0 &&
              query.size(1) % d.heads == 0,
          "query must be (tokens, heads, head_size) with dense rows, its heads a multiple of the KV heads");
  d.tokens = query.size(0);
  d.query_heads = query.size(1);
  d.query = query.data_ptr();
  d.query_strides[0] = query.stride(0);
  d.query_strides[1] = query.stride(1);
  d.dtype = float_type(query);
  d.fresh = read_tokens(key, value, d.heads, d.layout.head_size, d.dtype);
  d.update = d.fresh.rows() > 0;
  require(!d.update || d.fresh.rows() == d.tokens, "query and key have different tokens");
  const int64_t state = 4 * d.heads * d.cut.state_rows * d.layout.d;
  require(d.cut.state_rows >= 0 && d.cut.ring_at == 1 + d.cut.state_slots &&
              state <= d.cut.state_slots * 2 * d.heads * d.layout.head_size * (d.dtype == kvq::Dtype::f32 ? 4 : 2),
          "the sidecar has no room for its state");
  d.side = read_slots(side, d);
  d.sink = read_slots(sinks, d);
  d.side_blocks = data<char>(side);
  d.side_stride = side.stride(0) * (d.dtype == kvq::Dtype::f32 ? 4 : 2);
  require(out.ndim() == 3 && out.size(0) >= d.tokens && out.size(1) == d.query_heads &&
              out.size(2) == d.layout.head_size && out.stride(2) == 1,
          "out has the wrong shape");
  d.out = out.data_ptr();
  d.out_dtype = float_type(out);
  d.out_strides[0] = out.stride(0);
  d.out_strides[1] = out.stride(1);
  d.scale = float(scale);
  require(cap >= 0, "a soft cap must be positive");
  d.cap = float(cap);
  require_isa(threads, isa);
  d.threads = int(threads);
  d.isa = int(isa);
  try {
    return kvq::decode(d);
  } catch (const std::out_of_range& e) {
    TVM_FFI_THROW(IndexError) << e.what();
  } catch (const std::runtime_error& e) {
    TVM_FFI_THROW(RuntimeError) << e.what();
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_step, decode_step);

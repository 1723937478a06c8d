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
  const int64_t row = d.pool.heads * d.layout.head_size, size = d.dtype == kvq::Dtype::f32 ? 4 : 2;
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

void read_batch(kvq::Decode& d, const Batch& batch) {
  d.requests = batch.seq_lens.numel();
  d.query_start = ints(batch.query_start, d.requests + 1, "query_start must be dense int32, one longer than seq_lens");
  d.seq_lens = ints(batch.seq_lens, d.requests, "seq_lens must be dense int32");
  d.pages_of = read_block_table(batch.table, d.requests);
  d.side_of = read_block_table(batch.side_table, d.requests);
  d.sinks_of = read_block_table(batch.sink_table, d.requests);
}

void read_fresh(kvq::Decode& d, const Fresh& fresh) {
  const auto& [query, key, value] = fresh;
  require(query.ndim() == 3 && query.stride(2) == 1 && query.size(2) == d.layout.head_size && d.pool.heads > 0 &&
              query.size(1) % d.pool.heads == 0,
          "query must be (tokens, heads, head_size) with dense rows, its heads a multiple of the KV heads");
  d.tokens = query.size(0);
  d.query_heads = query.size(1);
  d.query = query.data_ptr();
  d.query_strides[0] = query.stride(0);
  d.query_strides[1] = query.stride(1);
  d.dtype = float_type(query);
  d.fresh = read_tokens({key, value}, d.pool.heads, d.layout.head_size, d.dtype);
  d.update = d.fresh.rows() > 0;
  require(!d.update || d.fresh.rows() == d.tokens, "query and key have different tokens");
}

void read_companion_blocks(kvq::Decode& d, const Cached& caches) {
  d.side = read_slots(caches.sidecar, d);
  d.sink = read_slots(caches.sinks, d);
  const kvq::Companions& cut = d.cut;
  const int64_t size = d.dtype == kvq::Dtype::f32 ? 4 : 2, slot = 2 * d.pool.heads * d.layout.head_size * size;
  const int64_t state = 4 * d.pool.heads * cut.state_rows * d.layout.d;
  require(cut.state_rows >= 0 && cut.state_at >= 0 && state <= (cut.ring_at - cut.state_at) * slot,
          "the sidecar has no room for its state");
  const int64_t header_end = cut.header_at + int64_t(sizeof(kvq::SideHeader));
  const bool behind = cut.header_at >= cut.slots_per_block * slot && header_end <= caches.sidecar.size(1) * size;
  const bool before = cut.header_at == 0 && header_end <= cut.state_at * slot;
  require(cut.header_at % int64_t(alignof(kvq::SideHeader)) == 0 && (behind || before),
          "the sidecar has no room for its header");
  d.side_blocks = data<char>(caches.sidecar);
  d.side_stride = caches.sidecar.stride(0) * size;
}

// out as the query. Without keys and values, (0, 1, heads, head_size), another layer has updated the caches.
int64_t decode_step(TensorView layout, TensorView cut, Tuple batch, Tuple fresh, Tuple cached, TensorView out,
                    TensorView scores, TensorView team) {
  kvq::Decode d{};
  d.layout = read_layout(layout);
  d.constants = read_constants(layout, d.layout);
  d.cut = read_companions(cut, d.layout);
  read_batch(d, Batch::of(batch));
  const Cached caches = Cached::of(cached);
  d.pool = read_pool(caches.pages, d.layout);
  read_fresh(d, Fresh::of(fresh));
  read_companion_blocks(d, caches);
  require(out.ndim() == 3 && out.size(0) >= d.tokens && out.size(1) == d.query_heads &&
              out.size(2) == d.layout.head_size && out.stride(2) == 1,
          "out has the wrong shape");
  d.out = out.data_ptr();
  d.out_dtype = float_type(out);
  d.out_strides[0] = out.stride(0);
  d.out_strides[1] = out.stride(1);
  d.scores = read_scores(scores);
  d.team = read_team(team);
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

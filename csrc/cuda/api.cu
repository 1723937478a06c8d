// The interface for Python, through apache-tvm-ffi: it checks shapes and types, and launches kernels on the stream that
// the caller names. Compiled by nvcc for a GPU, and by a C++ compiler with KVQ_EMULATE for tests without one.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <string>

#include "attend.h"
#include "pack.h"
#include "query.h"
#include "tuples.h"

namespace {

using namespace kvq_api;

#ifdef KVQ_EMULATE
constexpr int DEVICE = kDLCPU;

void begin() { kvq::emulated::machine().ranges.clear(); }

// Lane by lane, or by a registered emulator, which runs nvcc's output for part PART of cubin.cu.
template <int PART, int D, class P>
void launch(void (*kernel)(P), int x, int y, int threads, int shared_bytes, int64_t stream, const P& params) {
  (void)stream;
  if (auto emulator = tvm::ffi::Function::GetGlobal("vllm_kvq.emulated_launch")) {
    const auto& ranges = kvq::emulated::machine().ranges;
    (*emulator)(PART, D, x, y, threads, shared_bytes, reinterpret_cast<int64_t>(&params), int64_t(sizeof(P)),
                reinterpret_cast<int64_t>(ranges.data()), int64_t(ranges.size()));
    return;
  }
  kvq::launch(kernel, x, y, threads, shared_bytes, nullptr, params);
}
#else
constexpr int DEVICE = kDLCUDA;

void begin() {}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
}

template <int, int, class P>
void launch(void (*kernel)(P), int x, int y, int threads, int shared_bytes, int64_t stream, const P& params) {
  if (shared_bytes > 48 << 10)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               shared_bytes),
          "the kernel's shared memory does not fit this GPU");
  kernel<<<dim3(x, y), threads, shared_bytes, reinterpret_cast<cudaStream_t>(stream)>>>(params);
  check(cudaGetLastError(), "a kernel could not be launched");
}
#endif

void require(bool condition, const char* what) {
  if (!condition) TVM_FFI_THROW(ValueError) << what;
}

bool is(const TensorView& t, int code, int bits) {
  return t.device().device_type == DEVICE && t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
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

// The tensor's first element; every byte between it and the last one may be touched.
template <class T>
T* data(const TensorView& t) {
#ifdef KVQ_EMULATE
  if (t.numel()) {
    int64_t last = 0;
    for (int i = 0; i < t.ndim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    kvq::emulated::allow(t.data_ptr(), (last + 1) * t.dtype().bits / 8);
  }
#endif
  return static_cast<T*>(t.data_ptr());
}

template <class T>
T* floats(const TensorView& t, int64_t count, const char* what) {
  require(is(t, kDLFloat, 32) && dense(t) && t.numel() == count, what);
  return data<T>(t);
}

kvq::Type type_of(const TensorView& t) {
  if (is(t, kDLFloat, 32)) return kvq::Type::f32;
  if (is(t, kDLFloat, 16)) return kvq::Type::f16;
  require(is(t, kDLBfloat, 16), "queries, keys and values must be float32, float16 or bfloat16 on the pages' device");
  return kvq::Type::bf16;
}

int wide(const TensorView& t) {
  require(is(t, kDLInt, 32) || is(t, kDLInt, 64), "indices must be int32 or int64 on the pages' device");
  return t.dtype().bits == 64;
}

// A record's layout: head size, record bytes, slabs per record, where they begin, and the slab's offsets, which must be
// those with which the kernels were compiled.
template <class S>
void check_slab(const int64_t* l) {
  const int64_t mine[] = {S::M, S::MO, S::N, S::BYTES, S::K_BITS, S::K_NORM, S::KO_BITS,
                          S::KO_NORM, S::KO_INDEX, S::V_CODES, S::V_SCALE, S::V_ZERO};
  for (int i = 0; i < 12; ++i)
    require(l[4 + i] == mine[i], "this QJL format's slabs are not laid out as the CUDA kernels were compiled for");
}

struct Layout {
  int d, slabs, slabs_at;
  int64_t record_bytes;
};

Layout read_layout(const TensorView& t) {
  require(t.device().device_type == kDLCPU && t.dtype().code == kDLInt && t.dtype().bits == 64 && t.numel() == 16 &&
              dense(t),
          "the layout must be 16 int64 on the CPU");
  const int64_t* l = static_cast<const int64_t*>(t.data_ptr());
  switch (l[0]) {
    case 64: check_slab<kvq::Slab<64>>(l); break;
    case 128: check_slab<kvq::Slab<128>>(l); break;
    case 256: check_slab<kvq::Slab<256>>(l); break;
    default: require(false, "the CUDA kernels know head sizes 64, 128 and 256");
  }
  require(l[2] >= 1 && l[2] <= 48 && l[3] + l[2] * l[7] <= l[1], "the slabs do not fit the record");
  return {int(l[0]), int(l[2]), int(l[3]), l[1]};
}

void check_pages(const TensorView& t, const Layout& l) {
  require(is(t, kDLUInt, 8) && t.ndim() == 3 && t.size(2) >= l.record_bytes && t.stride(2) == 1,
          "pages must be uint8 (blocks, heads, record bytes) with a dense last dimension");
  require(t.stride(0) % 64 == 0 && t.stride(1) % 64 == 0 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 64 == 0,
          "pages are not aligned to 64 bytes");
}

kvq::Pages read_pages(const TensorView& t, const Layout& l) {
  check_pages(t, l);
  const uint32_t inverse = l.slabs == 1 ? 0 : uint32_t(((uint64_t(1) << 32) + l.slabs - 1) / l.slabs);
  return {data<const uint8_t>(t), t.size(0), t.stride(0), t.stride(1), int32_t(t.size(1)), l.slabs, l.slabs_at, inverse};
}

kvq::Sketches read_sketches(const Bound& bound, int d) {
  const auto& [layout, inner, outer, scale_inner, scale_outer] = bound;
  require(reinterpret_cast<uintptr_t>(inner.data_ptr()) % 16 == 0 &&
              reinterpret_cast<uintptr_t>(outer.data_ptr()) % 16 == 0,
          "the sketches are not aligned to 16 bytes");
  return {floats<const float>(inner, int64_t(d) * 2 * d, "the sketch must be (d, 2 d) dense float32"),
          floats<const float>(outer, int64_t(d) / 16 * d, "the outlier sketch must be (d / 16, d) dense float32"),
          float(scale_inner), float(scale_outer)};
}

template <int D, int TILES>
void attend(const kvq::QueryParams& q, const kvq::AttendParams& d, int64_t stream) {
  using S = kvq::Slab<D>;
  const int programs = d.rows.requests * d.rows.tiles * d.rows.heads;
  const int chunks = (S::M + 127) / 128 + (S::MO + 127) / 128;
  launch<2 + TILES, D>(kvq::query_kernel<D, TILES>, programs, chunks, 128, (D + 1) * 8 * TILES * 4 + S::N * 4, stream, q);
  launch<TILES, D>(kvq::attend_kernel<D, TILES>, programs, d.splits, 32 * kvq::warps_for(D),
                   kvq::Attend<D, TILES>::SHARED, stream, d);
}

// Rounds up so that every part of the workspace is aligned.
int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// The parts of the workspace, in order: operand, clean, sketched, unit, inverse, index.
int64_t workspace_bytes(int64_t d, int64_t programs, int64_t tile_rows) {
  const int64_t rows = programs * tile_rows;
  return padded(rows * (3 * d * 2)) + padded(rows * d * 4) + padded(rows * 2 * d * 4) + 2 * padded(rows * 4) +
         padded(programs * 16);
}

void attend_table(Tuple format, Tuple queries, TensorView pages, Tuple paged, double scale, int64_t tile_rows,
                  TensorView workspace, Tuple into, int64_t stream) {
  begin();
  const Bound bound = Bound::of(format);
  const auto [query, start, first, longest] = Queries::of(queries);
  const auto [table, low, high] = PageTable::of(paged);
  const auto [out, lse] = Part::of(into);
  const Layout l = read_layout(bound.layout);
  kvq::QueryParams q{};
  kvq::AttendParams d{};
  q.pages = d.pages = read_pages(pages, l);
  require(query.ndim() == 3 && query.size(2) == l.d && query.stride(2) == 1,
          "query must be (tokens, heads, head size) with dense rows");
  require(start.ndim() == 1 && start.numel() > 1 && dense(start), "start must be dense, one number more than requests");
  require(first >= 0 && longest > 0, "no queries");
  q.type = type_of(query);
  q.query = data<const void>(query);
  q.token_stride = query.stride(0);
  q.head_stride = query.stride(1);
  const int64_t heads = pages.size(1);
  require(heads > 0 && query.size(1) % heads == 0, "query heads must be a multiple of the KV heads");
  require(tile_rows == 8 || tile_rows == 16, "a program takes 8 or 16 rows");
  kvq::Rows rows{int32_t(start.numel() - 1), int32_t(longest), int32_t(heads), int32_t(query.size(1) / heads), 0,
                 int32_t(tile_rows), int32_t(first), data<const void>(start), wide(start), query.size(0)};
  rows.tiles = int32_t((int64_t(rows.queries) * rows.share + tile_rows - 1) / tile_rows);
  q.rows = d.rows = rows;
  require(table.ndim() == 2 && table.size(0) == rows.requests && (table.size(1) <= 1 || table.stride(1) == 1),
          "table must be (requests, pages) with dense rows");
  const bool listed = low.ndim() == 2;
  require(wide(low) == wide(high) && low.ndim() == high.ndim() && dense(low) && dense(high) &&
              low.numel() == high.numel() && low.numel() == (listed ? table.numel() : rows.requests),
          "low and high must be dense and of one type, per request or of the table's shape");
  require(!listed || dense(table), "with limits per page the table must be dense");
  d.table = {data<const void>(table), data<const void>(low), data<const void>(high), table.stride(0),
             int32_t(table.size(1)), wide(table), wide(low), int32_t(listed)};
  if (rows.requests == 1) d.table.row = 0;
  q.table = d.table;
  q.sketches = d.sketches = read_sketches(bound, l.d);
  require(scale > 0, "the softmax scale must be positive");
  q.scale = float(scale);
  const int64_t programs = int64_t(rows.requests) * rows.tiles * heads;
  require(programs > 0 && programs < (int64_t(1) << 31), "no rows, or too many");
  require(table.size(1) * l.slabs < (int64_t(1) << 26), "the table is too wide");

  require(is(workspace, kDLUInt, 8) && dense(workspace) && workspace.numel() >= workspace_bytes(l.d, programs, tile_rows) &&
              reinterpret_cast<uintptr_t>(workspace.data_ptr()) % 256 == 0,
          "the workspace is too small or not aligned to 256 bytes");
  uint8_t* part = data<uint8_t>(workspace);
  const int64_t all = programs * tile_rows;
  auto take = [&](int64_t bytes) {
    uint8_t* p = part;
    part += padded(bytes);
    return p;
  };
  q.operand = take(all * (3 * l.d * 2));
  q.clean = reinterpret_cast<float*>(take(all * l.d * 4));
  q.sketched = reinterpret_cast<float*>(take(all * 2 * l.d * 4));
  q.unit = reinterpret_cast<float*>(take(all * 4));
  q.inverse = reinterpret_cast<float*>(take(all * 4));
  q.index = reinterpret_cast<uint32_t*>(take(programs * 16));
  d.operand = q.operand;
  d.clean = q.clean;
  d.sketched = q.sketched;
  d.unit = q.unit;
  d.inverse = q.inverse;
  d.index = q.index;

  const int64_t lines = rows.tokens * query.size(1);
  require(lse.numel() % lines == 0 && lse.numel() > 0, "lse must be (splits, tokens, heads)");
  d.splits = int32_t(lse.numel() / lines);
  require(d.splits <= 65535, "too many splits");
  d.lse = floats<float>(lse, d.splits * lines, "lse must be dense float32");
  d.out = floats<float>(out, d.splits * lines * l.d, "out must be dense float32, one row per entry of lse");
  const bool two = tile_rows == 16;
  switch (l.d) {
    case 64: two ? attend<64, 2>(q, d, stream) : attend<64, 1>(q, d, stream); break;
    case 128: two ? attend<128, 2>(q, d, stream) : attend<128, 1>(q, d, stream); break;
    case 256: two ? attend<256, 2>(q, d, stream) : attend<256, 1>(q, d, stream); break;
  }
}

// Packs what a step completes; sidecars are of the keys' type.
void pack(Tuple format, TensorView pages, TensorView plan, TensorView table, Tuple sidecars, Tuple fresh,
          TensorView faults, int64_t units, int64_t stream) {
  begin();
  const Bound bound = Bound::of(format);
  const auto [side, side_table, slots_per_block, ring, ring_at, state_at, has_state] = Sidecars::of(sidecars);
  const auto [key, value] = Pair::of(fresh);
  const Layout l = read_layout(bound.layout);
  check_pages(pages, l);
  kvq::PackParams p{};
  p.pages = data<uint8_t>(pages);
  p.count = pages.size(0);
  p.page_stride = pages.stride(0);
  p.head_stride = pages.stride(1);
  p.heads = int32_t(pages.size(1));
  p.slabs = l.slabs;
  p.slabs_at = l.slabs_at;
  p.units = int32_t(units);
  require(is(plan, kDLInt, 32) && dense(plan) && plan.ndim() == 2 && plan.size(0) > kvq::CONTEXT,
          "the plan must be dense int32, one column per request");
  p.plan = data<const int32_t>(plan);
  p.requests = int32_t(plan.size(1));
  if (!p.requests || !p.units || !p.heads) return;
  require(table.ndim() == 2 && table.size(0) == p.requests && (table.size(1) <= 1 || table.stride(1) == 1) &&
              side_table.ndim() == 2 && side_table.size(0) == p.requests &&
              (side_table.size(1) <= 1 || side_table.stride(1) == 1),
          "tables must be (requests, blocks) with dense rows");
  p.table = data<const void>(table);
  p.wide_table = wide(table);
  p.table_row = table.stride(0);
  p.table_width = int32_t(table.size(1));
  require(key.ndim() == 3 && value.ndim() == 3 && key.size(1) == p.heads && value.size(1) == p.heads &&
              key.size(2) == l.d && value.size(2) == l.d && key.stride(2) == 1 && value.stride(2) == 1 &&
              key.size(0) == value.size(0),
          "keys and values must be (tokens, heads, head size) with dense rows");
  p.type = type_of(key);
  require(type_of(value) == p.type && type_of(side) == p.type, "keys, values and the sidecar must be of one type");
  p.key = data<const void>(key);
  p.value = data<const void>(value);
  p.key_token = key.stride(0);
  p.key_head = key.stride(1);
  p.value_token = value.stride(0);
  p.value_head = value.stride(1);
  p.tokens = key.size(0);
  const int64_t bytes = side.dtype().bits / 8, slot = 2 * p.heads * l.d * bytes;
  require(side.ndim() == 2 && side.stride(1) == 1 && side.stride(0) * bytes % 16 == 0 &&
              reinterpret_cast<uintptr_t>(side.data_ptr()) % 16 == 0,
          "the sidecar must be (blocks, elements), each block dense and aligned to 16 bytes");
  require(slots_per_block > 0 && ring > 0 && slots_per_block * slot <= side.size(1) * bytes &&
              side_table.size(1) * slots_per_block >= ring_at + ring,
          "the sidecar's slots do not fit its blocks");
  p.side = {data<const uint8_t>(side), side.size(0), side.stride(0) * bytes, data<const void>(side_table),
            side_table.stride(0), wide(side_table), int32_t(slots_per_block), int32_t(ring), int32_t(ring_at),
            int32_t(state_at)};
  p.has_state = has_state;
  require(is(faults, kDLInt, 32) && dense(faults) && faults.numel() >= 2, "faults must be two int32");
  p.faults = data<int32_t>(faults);
  p.sketches = read_sketches(bound, l.d);
  const int blocks = p.requests * p.units;
  switch (l.d) {
    case 64: launch<5, 64>(kvq::pack_kernel<64>, blocks, p.heads, 256, kvq::Pack<64>::SHARED, stream, p); break;
    case 128: launch<5, 128>(kvq::pack_kernel<128>, blocks, p.heads, 256, kvq::Pack<128>::SHARED, stream, p); break;
    case 256: launch<5, 256>(kvq::pack_kernel<256>, blocks, p.heads, 256, kvq::Pack<256>::SHARED, stream, p); break;
  }
}

// The tuples and their members in order, "Name:member,member Name:member ...".
tvm::ffi::String tuples() {
  std::string text;
#define KVQ_NAME(type, name) text += #name ",";
#define KVQ_TUPLE(Name, MEMBERS) \
  text += #Name ":";             \
  MEMBERS(KVQ_NAME)              \
  text.back() = ' ';
  KVQ_TUPLES(KVQ_TUPLE)
  return text;
}

// "name:value name:value ...".
tvm::ffi::String numbers() {
  std::string text;
#define KVQ_NUMBER(name, value) text += #name ":" + std::to_string(value) + " ";
  KVQ_NUMBERS(KVQ_NUMBER)
  return text;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(tuples, tuples);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(numbers, numbers);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_table, attend_table);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, workspace_bytes);

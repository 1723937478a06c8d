// Where the bytes of a QJL slab lie (vllm_kvq/formats/methods/qjl.py, values.py), and the arguments of a launch.
#pragma once

#include <cstdint>

namespace kvq {

constexpr int SLAB = 32;
constexpr int HEADER_BYTES = 64;
constexpr float LN2 = 0.6931471805599453f;
constexpr float LOWEST = -1.0e30f;
constexpr uint32_t MINUS_INFINITY = 0xFF800000u;

// NUMBER(name, value): what Python also says, in formats/page.py and formats/parts/quant.py. The library exports them,
// and kernels/gpu/cuda.py compares.
#define KVQ_NUMBERS(NUMBER)                                  \
  NUMBER(PAGE_MAGIC, 0x3151564B)                             \
  NUMBER(FLAGS_AT, 16) /* a page's flags, one per slab */    \
  NUMBER(LIMIT, 32768) /* of what is packed, in magnitude */

#define KVQ_NUMBER(name, value) constexpr int32_t name = value;
KVQ_NUMBERS(KVQ_NUMBER)
#undef KVQ_NUMBER

constexpr int up64(int bytes) { return (bytes + 63) / 64 * 64; }

// The defaults for head size D: m = 2 D, m' = D, n = D / 16, values of 2 bits in groups of 32 channels.
template <int D_>
struct Slab {
  static constexpr int D = D_, M = 2 * D, MO = D, N = D / 16, GROUPS = D / 32;
  static constexpr int K_BITS = 0;
  static constexpr int K_NORM = K_BITS + 4 * M;
  static constexpr int KO_BITS = K_NORM + 64;
  static constexpr int KO_NORM = KO_BITS + 4 * MO;
  static constexpr int KO_INDEX = KO_NORM + 64;
  static constexpr int V_CODES = KO_INDEX + up64(N);
  static constexpr int V_SCALE = V_CODES + 8 * D;
  static constexpr int V_ZERO = V_SCALE + up64(64 * GROUPS);
  static constexpr int BYTES = V_ZERO + up64(64 * GROUPS);
  static constexpr int INDEX_WORDS = N / 4;

  // steps of 16 sketch rows of the matrix product: 8 planes per 128 rows; 64 rows are 4 planes of two quads each
  static constexpr int INNER_STEPS = M / 16, OUTER_STEPS = MO / 16, STEPS = INNER_STEPS + OUTER_STEPS;
  // bytes of the query operand of 8 rows: two registers per step and lane
  static constexpr int OPERAND_BYTES = STEPS * 2 * 4 * 32;

  static_assert(D == 64 || D == 128 || D == 256, "head sizes 64, 128 and 256");
};

enum class Type : int32_t {
  f32,
  f16,
  bf16,
};

struct Pages {
  const uint8_t* data;
  int64_t count, page_stride, head_stride;
  int32_t heads, slabs, slabs_at;
  uint32_t slabs_inverse;  // ceil(2^32 / slabs); unused for one slab
};

// Which tokens of which pages a request attends: limits per request, or with `listed` per page.
struct Table {
  const void *ids, *low, *high;
  int64_t row;  // from one request's ids to the next; also of the limits, if listed
  int32_t width, wide_ids, wide_limits, listed;
};

// Rows are (request, query, query head); a program is (request, tile of rows, KV head). The queries of all requests lie
// one after the other: request i has tokens [start[i], start[i + 1]), of which at most `queries`, from its `first` on,
// are attended.
struct Rows {
  int32_t requests, queries, heads, share, tiles, tile_rows, first;
  const void* start;
  int32_t wide_start;
  int64_t tokens;  // of query and out
};

struct Sketches {
  const float *inner, *outer;  // transposed: (D, M) and (N, MO)
  float scale_inner, scale_outer;
};

struct QueryParams {
  const void* query;
  int64_t token_stride, head_stride;
  Type type;
  Rows rows;
  Pages pages;
  Table table;
  Sketches sketches;
  float scale;      // of the softmax
  float* clean;     // (programs, tile rows, D)
  float* sketched;  // (programs, tile rows, M)
  float* unit;      // (programs, tile rows): a score's operand unit in base-2 logarithms
  float* inverse;   // (programs, tile rows): 1 / |q|
  uint8_t* operand;   // (programs, tile rows / 8, OPERAND_BYTES)
  uint32_t* index;  // (programs, 4): the outlier channels that `operand` leaves out; all ones: none
};

struct AttendParams {
  Rows rows;
  Pages pages;
  Table table;
  Sketches sketches;
  const float *clean, *sketched, *unit, *inverse;
  const uint8_t* operand;
  const uint32_t* index;
  int32_t splits;
  float *out, *lse;  // (splits, rows, D) and (splits, rows)
};

// A request's tokens in full precision: blocks of slots, one token's keys and values each (vllm_kvq/kernels/slots.py).
struct Sidecar {
  const uint8_t* data;
  int64_t blocks, block_bytes;
  const void* table;
  int64_t row;  // from one request's blocks to the next
  int32_t wide_table, slots_per_block, ring, ring_at, state_at;
};

// Rows of a step's plan (vllm_kvq/triton_kernels/step.py).
constexpr int FIRST = 0, COUNT = 1, CONTEXT = 2;

struct PackParams {
  const int32_t* plan;  // (rows, requests)
  const void* table;
  int64_t table_row;
  int32_t wide_table, table_width, requests, units;  // units: the maximum that one request completes
  const void *key, *value;
  int64_t key_token, key_head, value_token, value_head;
  Type type;       // of keys, values and the ring
  int64_t tokens;  // of key and value
  Sidecar side;
  int32_t has_state;  // whether the sidecar holds the prompt's energies and number of tokens
  int32_t* faults;    // [1] counts elements that were replaced
  uint8_t* pages;
  int64_t count, page_stride, head_stride;
  int32_t heads, slabs, slabs_at;
  Sketches sketches;
};

}  // namespace kvq

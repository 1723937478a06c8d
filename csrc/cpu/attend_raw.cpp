// The driver of attend_raw: one task per request, KV head and up to ROWS of its query rows, which walks all tokens
// that any of its rows sees. (Rings and sinks are short, and a prompt chunk has many row blocks: no splits.)
#include <algorithm>
#include <cmath>
#include <string>

#include "attend.h"
#include "cpu.h"
#include "half.h"
#include "scratch.h"
#include "threads.h"

namespace kvq {
namespace {

constexpr float LOG2_E = 1.44269504089f, LN_2 = 0.69314718056f;

float read(const void* from, Dtype dtype, int64_t at) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return dtype == Dtype::f16 ? half_or_nan(bits) : bfloat_to_float(bits);
}

const void* element(const void* base, Dtype dtype, int64_t at) {
  return static_cast<const char*>(base) + at * (dtype == Dtype::f32 ? 4 : 2);
}

struct Walk {
  const AttendRaw& a;
  const Isa& isa;
  int64_t group, lines;  // lines: query rows of a KV head

  void task(int64_t request, int64_t head, int64_t first) const {
    thread_local Scratch scratch;
    const int64_t d = (a.head_size + SLAB - 1) / SLAB * SLAB, rows = std::min<int64_t>(ROWS, lines - first);
    float* memory = reinterpret_cast<float*>(scratch.reserve(4 * (2 * ROWS * d + 2 * SLAB * d + ROWS * SLAB + 2 * ROWS)));
    RawTask t{};
    t.rows = int(rows);
    t.first_row = int(first % group);  // `seen` starts at the first row's query
    t.group = int(group);
    t.head_size = int(a.head_size);
    t.d = int(d);
    t.dtype = a.dtype;
    t.seen_stride = a.tokens;
    t.out = memory;
    t.work = memory + 2 * ROWS * d;
    t.top = t.work + 2 * SLAB * d + ROWS * SLAB;
    t.total = t.top + ROWS;
    float* query = memory + ROWS * d;
    t.query = query;
    for (int64_t r = 0; r < rows; ++r) read_query(request, head, first + r, query + r * d, d);
    std::fill_n(t.out, rows * d, 0.0f);
    std::fill_n(t.top, rows, -1e30f);
    std::fill_n(t.total, rows, 0.0f);
    const int64_t first_query = first / group, queries = (first + rows - 1) / group - first_query + 1;
    const uint8_t* seen = a.seen + (request * a.queries + first_query) * a.tokens;
    for (int64_t start = 0; start < a.tokens; start += SLAB) {
      t.tokens = int(std::min<int64_t>(SLAB, a.tokens - start));
      t.seen = seen + start;
      bool any = false;
      for (int i = 0; i < SLAB; ++i) any |= locate(t, request, head, start, i, queries);
      if (any) isa.add_raw(t);
    }
    for (int64_t r = 0; r < rows; ++r) finish(t, int(r), output_row(request, head, first + r));
  }

  // The token's addresses, null unless one of the task's queries sees it: what nobody sees is not read.
  bool locate(RawTask& t, int64_t request, int64_t head, int64_t start, int i, int64_t queries) const {
    t.key[i] = t.value[i] = nullptr;
    if (i >= t.tokens) return false;
    bool wanted = false;
    for (int64_t q = 0; q < queries; ++q) wanted |= t.seen[q * a.tokens + i] != 0;
    const int64_t row = a.rows ? a.rows[request * a.tokens + start + i] : request * a.slots + start + i;
    if (!wanted || row < 0) return false;
    const int64_t block = row / a.slots, slot = row % a.slots;
    const auto at = [&](const int64_t* s) { return block * s[0] + slot * s[1] + head * s[2]; };
    t.key[i] = element(a.key, a.dtype, at(a.key_strides));
    t.value[i] = element(a.value, a.dtype, at(a.value_strides));
    return true;
  }

  void read_query(int64_t request, int64_t head, int64_t r, float* to, int64_t d) const {
    const int64_t at = request * a.query_strides[0] + r / group * a.query_strides[1] +
                       (head * group + r % group) * a.query_strides[2];
    for (int64_t c = 0; c < a.head_size; ++c) to[c] = read(a.query, a.query_dtype, at + c) * a.scale * LOG2_E;
    std::fill(to + a.head_size, to + d, 0.0f);
  }

  int64_t output_row(int64_t request, int64_t head, int64_t r) const {
    return (request * a.queries + r / group) * a.query_heads + head * group + r % group;
  }

  void finish(const RawTask& t, int r, int64_t row) const {
    const float inverse = t.total[r] > 0 ? 1 / t.total[r] : 0.0f;
    for (int64_t c = 0; c < a.head_size; ++c) a.out[row * a.head_size + c] = t.out[r * t.d + c] * inverse;
    a.lse[row] = t.total[r] > 0 ? (t.top[r] + std::log2(t.total[r])) * LN_2 : -INFINITY;
  }
};

}  // namespace

void attend_raw(const AttendRaw& a) {
  const int64_t count = a.rows ? a.requests * a.tokens : 0, limit = a.blocks * a.slots;
  for (int64_t i = 0; i < count; ++i)
    if (a.rows[i] >= limit)
      throw std::out_of_range("row " + std::to_string(a.rows[i]) + " is not one of " + std::to_string(limit) + " rows");
  const int64_t group = a.query_heads / a.heads, lines = a.queries * group, tiles = (lines + ROWS - 1) / ROWS;
  const Walk walk{a, isa(a.isa), group, lines};
  parallel(a.threads, a.requests * a.heads * tiles, [&](int64_t i) {
    walk.task(i / tiles / a.heads, i / tiles % a.heads, i % tiles * ROWS);
  });
}

}  // namespace kvq

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

void write(void* to, Dtype dtype, int64_t at, float x) {
  if (dtype == Dtype::f32)
    static_cast<float*>(to)[at] = x;
  else
    static_cast<uint16_t*>(to)[at] = dtype == Dtype::f16 ? float_to_half(x) : float_to_bfloat(x);
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
    for (int64_t r = 0; r < rows; ++r) finish(t, int(r), request, head, first + r);
  }

  // The token's addresses, null unless one of the task's queries sees it: what nobody sees is not read.
  bool locate(RawTask& t, int64_t request, int64_t head, int64_t start, int i, int64_t queries) const {
    t.key[i] = t.value[i] = nullptr;
    if (i >= t.tokens) return false;
    bool wanted = false;
    for (int64_t q = 0; q < queries; ++q) wanted |= t.seen[q * a.tokens + i] != 0;
    int64_t row = a.rows[request * a.tokens + start + i];
    if (!wanted || row < 0) return false;
    const Tokens& from = row < a.pool.rows() ? a.pool : a.more;
    if (&from == &a.more) row -= a.pool.rows();
    const int64_t block = row / from.slots, slot = row % from.slots;
    const auto at = [&](const int64_t* s) { return block * s[0] + slot * s[1] + head * s[2]; };
    t.key[i] = element(from.key, a.dtype, at(from.key_strides));
    t.value[i] = element(from.value, a.dtype, at(from.value_strides));
    return true;
  }

  void read_query(int64_t request, int64_t head, int64_t r, float* to, int64_t d) const {
    const int64_t at = request * a.query_strides[0] + r / group * a.query_strides[1] +
                       (head * group + r % group) * a.query_strides[2];
    const float factor = a.scale * LOG2_E;
    if (a.query_dtype == Dtype::f32) {
      const float* from = static_cast<const float*>(a.query) + at;
      for (int64_t c = 0; c < a.head_size; ++c) to[c] = from[c] * factor;
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(a.query) + at;
      if (a.query_dtype == Dtype::f16)
        for (int64_t c = 0; c < a.head_size; ++c) to[c] = half_or_nan(from[c]) * factor;
      else
        for (int64_t c = 0; c < a.head_size; ++c) to[c] = bfloat_to_float(from[c]) * factor;
    }
    std::fill(to + a.head_size, to + d, 0.0f);
  }

  // o = sum_i exp(l_i - l) o_i over this part and the prior ones, l = log sum_i exp l_i
  void finish(RawTask& t, int r, int64_t request, int64_t head, int64_t line) const {
    const int64_t token = request * a.queries + line / group, query_head = head * group + line % group;
    const int64_t at = token * a.query_heads + query_head, n = a.head_size;
    const float lse = t.total[r] > 0 ? (t.top[r] + std::log2(t.total[r])) * LN_2 : -INFINITY;
    if (a.lse) a.lse[at] = lse;
    float* x = t.out + r * t.d;
    float top = lse, total = 1, own = t.total[r] > 0 ? 1 / t.total[r] : 0.0f;
    for (const float* p : a.prior_lse)
      if (p && p[at] > top) top = p[at];
    const auto weight = [&](float l) { return top == -INFINITY ? 0.0f : std::exp(l - top); };
    if (a.prior_lse[0] || a.prior_lse[1]) {
      own *= weight(lse);
      total = weight(lse);
      for (int i = 0; i < 2; ++i)
        if (a.prior_lse[i]) total += weight(a.prior_lse[i][at]);
    }
    const float inverse = total > 0 ? 1 / total : 0.0f;
    for (int64_t c = 0; c < n; ++c) x[c] *= own * inverse;
    for (int i = 0; i < 2; ++i) {
      const float w = a.prior_lse[i] ? weight(a.prior_lse[i][at]) * inverse : 0.0f;
      if (w == 0) continue;
      for (int64_t c = 0; c < n; ++c) x[c] += w * a.prior_out[i][at * n + c];
    }
    const int64_t to = a.out_rows[token] * a.out_strides[0] + query_head * a.out_strides[1];
    for (int64_t c = 0; c < n; ++c) write(a.out, a.out_dtype, to + c, x[c]);
  }
};

}  // namespace

void attend_raw(const AttendRaw& a) {
  const int64_t limit = a.pool.rows() + a.more.rows();
  for (int64_t i = 0; i < a.requests * a.tokens; ++i)
    if (a.rows[i] >= limit)
      throw std::out_of_range("row " + std::to_string(a.rows[i]) + " is not one of " + std::to_string(limit) + " rows");
  for (int64_t i = 0; i < a.requests * a.queries; ++i)
    if (a.out_rows[i] < 0 || a.out_rows[i] >= a.out_count)
      throw std::out_of_range("output row " + std::to_string(a.out_rows[i]) + " is not one of " +
                              std::to_string(a.out_count));
  const int64_t group = a.query_heads / a.heads, lines = a.queries * group, tiles = (lines + ROWS - 1) / ROWS;
  const Walk walk{a, isa(a.isa), group, lines};
  parallel(a.threads, a.requests * a.heads * tiles, [&](int64_t i) {
    walk.task(i / tiles / a.heads, i / tiles % a.heads, i % tiles * ROWS);
  });
}

}  // namespace kvq

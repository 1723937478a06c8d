// Full-precision tokens: a task walks all tokens that any of its rows sees. (Rings and sinks are short, and a prompt
// chunk has many row blocks: no splits.)
#include <algorithm>

#include "attend.h"
#include "cpu.h"
#include "half.h"

namespace kvq {
namespace {

const void* element(const void* base, Dtype dtype, int64_t at) {
  return static_cast<const char*>(base) + at * (dtype == Dtype::f32 ? 4 : 2);
}

struct Walk {
  const Attend& a;
  const Raw& raw;
  int64_t request, head, queries;

  // The token's addresses, null unless one of the task's queries sees it: what nobody sees is not read.
  bool locate(RawTask& t, int64_t start, int i) const {
    t.key[i] = t.value[i] = nullptr;
    if (i >= t.tokens) return false;
    bool wanted = false;
    for (int64_t q = 0; q < queries; ++q) wanted |= t.seen[q * raw.tokens + i] != 0;
    int64_t row = raw.rows[request * raw.tokens + start + i];
    if (!wanted || row < 0) return false;
    const Tokens& from = row < raw.pool.rows() ? raw.pool : raw.more;
    if (&from == &raw.more) row -= raw.pool.rows();
    const int64_t block = row / from.slots, slot = row % from.slots;
    const auto at = [&](const int64_t* s) { return block * s[0] + slot * s[1] + head * s[2]; };
    t.key[i] = element(from.key, raw.dtype, at(from.key_strides));
    t.value[i] = element(from.value, raw.dtype, at(from.value_strides));
    return true;
  }

  // A row of the queries, times scale * log2(e)
  void read_query(int64_t r, int64_t group, float* to, int64_t d) const {
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
};

}  // namespace

void attend_raw_rows(const Attend& a, int64_t request, int64_t head, int64_t first, int64_t rows, float* out,
                     float* top, float* total, float* work) {
  const int64_t d = (a.head_size + SLAB - 1) / SLAB * SLAB, group = a.query_heads / a.heads;
  const int64_t first_query = first / group, queries = (first + rows - 1) / group - first_query + 1;
  const Walk walk{a, a.raw, request, head, queries};
  const Isa& isa = kvq::isa(a.isa);
  float* query = work;
  for (int64_t r = 0; r < rows; ++r) walk.read_query(first + r, group, query + r * d, d);
  RawTask t{};
  t.rows = int(rows);
  t.first_row = int(first % group);  // `seen` starts at the first row's query
  t.group = int(group);
  t.head_size = int(a.head_size);
  t.d = int(d);
  t.dtype = a.raw.dtype;
  t.seen_stride = a.raw.tokens;
  t.query = query;
  t.work = query + ROWS * d;
  t.out = out;
  t.top = top;
  t.total = total;
  std::fill_n(out, rows * d, 0.0f);
  std::fill_n(top, rows, -1e30f);
  std::fill_n(total, rows, 0.0f);
  const uint8_t* seen = a.raw.seen + (request * a.queries + first_query) * a.raw.tokens;
  for (int64_t start = 0; start < a.raw.tokens; start += SLAB) {
    t.tokens = int(std::min<int64_t>(SLAB, a.raw.tokens - start));
    t.seen = seen + start;
    bool any = false;
    for (int i = 0; i < SLAB; ++i) any |= walk.locate(t, start, i);
    if (any) isa.add_raw(t);
  }
}

}  // namespace kvq

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

// Which of 32 tokens a run of queries sees: some of them, and all of them.
struct Sight {
  uint8_t some[SLAB] = {}, all[SLAB];

  Sight(const uint8_t* seen, int64_t stride, int64_t queries, int tokens) {
    std::fill_n(all, SLAB, uint8_t(0));
    std::fill_n(all, tokens, uint8_t(1));
    for (int64_t q = 0; q < queries; ++q)
      for (int i = 0; i < tokens; ++i) {
        const uint8_t x = seen[q * stride + i];
        some[i] |= x;
        all[i] &= x;
      }
  }
  bool any() const { return std::any_of(some, some + SLAB, [](uint8_t x) { return x != 0; }); }
  bool whole() const { return std::all_of(all, all + SLAB, [](uint8_t x) { return x != 0; }); }
};

struct Walk {
  const Attend& a;
  const Raw& raw;
  int64_t request, head;

  // The token's addresses, null if it is absent.
  void locate(RawTask& t, int64_t start, int i) const {
    t.key[i] = t.value[i] = nullptr;
    int64_t row = raw.rows[request * raw.tokens + start + i];
    if (row < 0) return;
    const Tokens& from = row < raw.pool.rows() ? raw.pool : raw.more;
    if (&from == &raw.more) row -= raw.pool.rows();
    // a 64-bit division takes several times as long, and every head divides
    const bool small = (row | from.slots) >> 32 == 0;
    const int64_t block = small ? uint32_t(row) / uint32_t(from.slots) : row / from.slots, slot = row - block * from.slots;
    const auto at = [&](const int64_t* s) { return block * s[0] + slot * s[1] + head * s[2]; };
    t.key[i] = element(from.key, raw.dtype, at(from.key_strides));
    t.value[i] = element(from.value, raw.dtype, at(from.value_strides));
  }

  // Those of 32 tokens that any of the queries sees: what nobody sees is not read.
  bool locate_seen(RawTask& t, int64_t start, const Sight& sight) const {
    bool found = false;
    for (int i = 0; i < SLAB; ++i) {
      t.key[i] = t.value[i] = nullptr;
      if (sight.some[i]) locate(t, start, i);
      found |= t.key[i] != nullptr;
    }
    return found;
  }

  __attribute__((always_inline)) void prefetch_first(const RawTask& t) const {
    const int bytes = int(a.head_size) * (raw.dtype == Dtype::f32 ? 4 : 2);
    for (int i = 0; i < RAW_AHEAD; ++i) prefetch_token(t.key[i], bytes);
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
  const Walk walk{a, a.raw, request, head};
  const Isa& isa = kvq::isa(a.isa);
  const auto query_of = [&](int64_t row) { return (first + row) / group; };
  const auto tokens_from = [&](int64_t start) { return int(std::min<int64_t>(SLAB, a.raw.tokens - start)); };
  const uint8_t* all_seen = a.raw.seen + request * a.queries * a.raw.tokens;
  const auto sight_of = [&](int64_t start, int64_t from, int64_t to) {  // rows [from, to)
    const int64_t q = query_of(from);
    return Sight(all_seen + start + q * a.raw.tokens, a.raw.tokens, query_of(to - 1) + 1 - q, tokens_from(start));
  };
  // The first of the next 32 tokens from `start` on, which begin to come in while others are worked on.
  RawTask next{};
  const auto find = [&](int64_t start) {
    while (start < a.raw.tokens && !walk.locate_seen(next, start, sight_of(start, 0, rows))) start += SLAB;
    if (start < a.raw.tokens) walk.prefetch_first(next);
    return start;
  };
  int64_t start = find(0);

  float* query = work;
  for (int64_t r = 0; r < rows; ++r) walk.read_query(first + r, group, query + r * d, d);
  RawTask t{};
  t.group = int(group);
  t.head_size = int(a.head_size);
  t.d = int(d);
  t.dtype = a.raw.dtype;
  t.seen_stride = a.raw.tokens;
  t.work = query + rows * d;
  std::fill_n(out, rows * d, 0.0f);
  std::fill_n(top, rows, -1e30f);
  std::fill_n(total, rows, 0.0f);
  while (start < a.raw.tokens) {
    t.tokens = tokens_from(start);
    std::copy_n(next.key, SLAB, t.key);
    std::copy_n(next.value, SLAB, t.value);
    const int64_t following = find(start + SLAB);
    t.gathered = false;
    const bool complete = std::all_of(t.key, t.key + SLAB, [](const void* key) { return key != nullptr; });
    for (int64_t r = 0; r < rows; r += ROWS) {
      t.rows = int(std::min<int64_t>(ROWS, rows - r));
      const Sight sight = sight_of(start, r, r + t.rows);
      if (!sight.any()) continue;
      t.all_seen = complete && sight.whole();
      t.first_row = int((first + r) % group);  // `seen` starts at the first row's query
      t.seen = all_seen + start + query_of(r) * a.raw.tokens;
      t.query = query + r * d;
      t.out = out + r * d;
      t.top = top + r;
      t.total = total + r;
      isa.add_raw(t);
    }
    start = following;
  }
}

}  // namespace kvq

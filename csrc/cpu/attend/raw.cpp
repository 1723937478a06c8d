// Full-precision tokens: a task takes all tokens that any of its rows sees. They are never split into several tasks:
// rings and sinks are short, and a prompt's chunk has many blocks of rows.
#include <algorithm>
#include <cstring>

#include "attend.h"
#include "../dispatch/isa.h"
#include "../half.h"

namespace kvq {
namespace {

// Which of 32 tokens a run of queries sees: some of them, and all of them. A byte per token, 0 or 1, in words of 8.
struct Sight {
  static constexpr int WORDS = SLAB / 8;
  uint64_t some[WORDS] = {}, all[WORDS];

  Sight(const uint8_t* seen, int64_t stride, int64_t queries, int tokens) {
    std::memset(all, 0, sizeof all);
    std::memset(all, 1, size_t(tokens));
    for (int64_t q = 0; q < queries; ++q) {
      uint64_t row[WORDS] = {};
      std::memcpy(row, seen + q * stride, size_t(tokens));
      for (int i = 0; i < WORDS; ++i) {
        some[i] |= row[i];
        all[i] &= row[i];
      }
    }
  }
  bool of(int token) const { return reinterpret_cast<const uint8_t*>(some)[token]; }
  bool any() const {
    uint64_t x = 0;
    for (int i = 0; i < WORDS; ++i) x |= some[i];
    return x != 0;
  }
  bool whole() const {
    bool x = true;
    for (int i = 0; i < WORDS; ++i) x &= all[i] == 0x0101010101010101;
    return x;
  }
};

struct Walk {
  const Attend& a;
  const Raw& raw;
  const Place* places;
  int64_t request, head;

  // Those of 32 tokens that any of the queries sees: the others are not read.
  bool locate_seen(RawTask& t, int64_t start, const Sight& sight) const {
    bool found = false;
    const int tokens = int(std::min<int64_t>(SLAB, raw.tokens - start));
    for (int i = 0; i < SLAB; ++i) {
      const Place* p = i < tokens && sight.of(i) ? places + start + i : nullptr;
      const bool there = p && p->key;
      t.key[i] = there ? p->key + head * p->key_head : nullptr;
      t.value[i] = there ? p->value + head * p->value_head : nullptr;
      found |= there;
    }
    return found;
  }

  __attribute__((always_inline)) void prefetch_first(const RawTask& t) const {
    const int bytes = int(a.head_size) * (raw.dtype == Dtype::f32 ? 4 : 2);
    for (int i = 0; i < RAW_AHEAD; ++i) prefetch_token(t.key[i], bytes);
  }

  int64_t query_at(int64_t r, int64_t group) const {
    return request * a.query_strides[0] + r / group * a.query_strides[1] + (head * group + r % group) * a.query_strides[2];
  }

  // A row of the queries, as it is
  void read_bits(int64_t r, int64_t group, uint16_t* to) const {
    std::memcpy(to, static_cast<const uint16_t*>(a.query) + query_at(r, group), 2 * size_t(a.head_size));
  }

  // A row of the queries, times scale * log2(e)
  void read_query(int64_t r, int64_t group, float* to, int64_t d) const {
    const int64_t at = query_at(r, group);
    const float factor = a.scores.scale * LOG2_E;
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

std::vector<Place> locate_raw(const Attend& a) {
  std::vector<Place> places(size_t(a.requests * a.raw.tokens));
  const int64_t bytes = a.raw.dtype == Dtype::f32 ? 4 : 2;
  for (size_t i = 0; i < places.size(); ++i) {
    int64_t row = a.raw.rows[i];
    if (row < 0) continue;  // null
    const bool pooled = row < a.raw.pool.rows();
    const Tokens& from = pooled ? a.raw.pool : a.raw.more;
    if (!pooled) row -= a.raw.pool.rows();
    // a 64-bit division takes several times as long
    const bool small = (row | from.slots) >> 32 == 0;
    const int64_t block = small ? uint32_t(row) / uint32_t(from.slots) : row / from.slots, slot = row - block * from.slots;
    const auto at = [&](const void* base, const int64_t* s) {
      return static_cast<const char*>(base) + (block * s[0] + slot * s[1]) * bytes;
    };
    places[i] = {at(from.key, from.key_strides), at(from.value, from.value_strides), from.key_strides[2] * bytes,
                 from.value_strides[2] * bytes};
  }
  return places;
}

void attend_raw_rows(const Attend& a, const Place* places, const RowBlock& block, const RunningSoftmax& softmax,
                     float* work) {
  const int64_t first = block.row, rows = block.rows;
  const int64_t d = (a.head_size + SLAB - 1) / SLAB * SLAB, group = a.query_heads / a.heads;
  const Walk walk{a, a.raw, places, block.request, block.head};
  const AttendKernels& kernels = isa(a.team.isa).attend;
  const auto query_of = [&](int64_t row) { return (first + row) / group; };
  const auto tokens_from = [&](int64_t start) { return int(std::min<int64_t>(SLAB, a.raw.tokens - start)); };
  const uint8_t* all_seen = a.raw.seen + block.request * a.queries * a.raw.tokens;
  const auto sight_of = [&](int64_t start, int64_t from, int64_t to) {  // rows [from, to)
    const int64_t q = query_of(from);
    return Sight(all_seen + start + q * a.raw.tokens, a.raw.tokens, query_of(to - 1) + 1 - q, tokens_from(start));
  };
  // The first of the next 32 tokens from `start` on, which are prefetched while others are processed.
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
  t.unit = a.scores.scale * LOG2_E;
  t.cap = a.scores.cap * LOG2_E;
  t.work = query + rows * d;
  uint16_t* bits = reinterpret_cast<uint16_t*>(t.work + 2 * SLAB * d + ROWS * SLAB);
  const bool both_bf16 = a.query_dtype == Dtype::bf16 && a.raw.dtype == Dtype::bf16 && a.head_size == d && has_bf16();
  for (int64_t r = 0; r < rows && both_bf16; ++r) walk.read_bits(first + r, group, bits + r * d);
  std::fill_n(softmax.out, rows * d, 0.0f);
  std::fill_n(softmax.top, rows, -1e30f);
  std::fill_n(softmax.total, rows, 0.0f);
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
      t.query_bits = both_bf16 ? bits + r * d : nullptr;
      t.out = softmax.out + r * d;
      t.top = softmax.top + r;
      t.total = softmax.total + r;
      kernels.add_raw(t);
    }
    start = following;
  }
}

}  // namespace kvq

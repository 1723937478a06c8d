// Numbers of any float type, indices of either width, and the entry of the block table for a slab's number.
#pragma once

#include "lanes.h"
#include "layout.h"

namespace kvq {

KVQ_DEV float load_float(const void* p, Type type, int64_t at) {
  if (type == Type::f32) return load(static_cast<const float*>(p) + at);
  const uint16_t bits = load(static_cast<const uint16_t*>(p) + at);
  return type == Type::f16 ? half_to_float(bits) : bits_to_float(uint32_t(bits) << 16);
}

// finite: NaN becomes 0
KVQ_DEV float clean(float x) {
  if (!(x == x)) return 0.0f;
  return x > LIMIT ? LIMIT : (x < -LIMIT ? -LIMIT : x);
}

KVQ_DEV int bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

KVQ_DEV int64_t load_index(const void* p, int wide, int64_t at) {
  return wide ? load(static_cast<const int64_t*>(p) + at) : load(static_cast<const int32_t*>(p) + at);
}

KVQ_DEV int clamp_int(int64_t x, int64_t low, int64_t high) { return int(x < low ? low : (x > high ? high : x)); }

// Which tokens of the whole request are attended at all: [low, high), cut to the table.
struct Span {
  int low, high;
};

KVQ_DEV Span span_of(const Table& t, const Pages& pages, int request) {
  const int64_t all = int64_t(t.width) * pages.slabs * SLAB;
  if (t.listed) return {0, int(all)};
  return {clamp_int(load_index(t.low, t.wide_limits, request), 0, all),
          clamp_int(load_index(t.high, t.wide_limits, request), 0, all)};
}

struct Place {
  int page, slab;  // column of the table, slab of the page
};

KVQ_DEV Place place_of(const Pages& pages, int slab) {
  const int page = pages.slabs == 1 ? slab : int(high_product(uint32_t(slab), pages.slabs_inverse));
  return {page, slab - page * pages.slabs};
}

// The record of one KV head, or null for an id that is no page.
KVQ_DEV const uint8_t* record_of(const Table& t, const Pages& pages, int request, int page, int head) {
  const int64_t id = load_index(t.ids, t.wide_ids, request * t.row + page);
  if (id < 0 || id >= pages.count) return nullptr;
  return pages.data + id * pages.page_stride + head * pages.head_stride;
}

// The query token of a request's row, or -1 for a padded row.
KVQ_DEV int64_t token_of(const Rows& rows, int request, int row) {
  const int query = row / rows.share;
  if (query >= rows.queries) return -1;
  const int64_t at = load_index(rows.start, rows.wide_start, request) + rows.first + query;
  const int64_t end = load_index(rows.start, rows.wide_start, request + 1);
  return at >= 0 && at < end && at < rows.tokens ? at : -1;
}

}  // namespace kvq

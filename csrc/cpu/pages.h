// Packed pages, wherever they lie, and lists of those that are attended.
#pragma once

#include <cstdint>

namespace kvq {

// A layer's records, (pages, heads), strides in bytes.
struct Pool {
  uint8_t* records;  // only packing writes to them
  int64_t pages, heads, page_stride, head_stride;
};

// `count` pages: tokens [low[i], high[i]) of page ids[i] are attended by request owner[i].
struct PageList {
  int64_t count = 0;
  const int64_t *ids, *owner, *low, *high;
};

}  // namespace kvq

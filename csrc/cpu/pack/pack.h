// Packing without Python: full-precision tokens, wherever they lie, into slabs of pages.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "../tokens.h"

namespace kvq {

struct Pack {
  Layout layout;
  Constants constants;
  uint8_t* records;  // (pages, heads), strides in bytes
  int64_t pages, heads, page_stride, head_stride;
  // Unit i is unit[i] of page[i], of `unit_tokens` tokens; rows (units, unit_tokens) are rows of `old` first, then of
  // `fresh`. owner[i] is the row of `state` that it uses; follows[i]: its page was started earlier and keeps its
  // parameters.
  int64_t units, unit_tokens;
  const int64_t *page, *unit, *rows, *owner;
  const uint8_t* follows;
  Tokens old, fresh;
  Dtype dtype;
  const float* state;  // (owners, heads, state_rows, d), null where the keys follow none
  int64_t owners, state_rows;
  int threads, isa;
};

// Copies tokens into the pool: row rows[i] of `to` (which is written) gets row source[i] of `from`.
struct Store {
  Tokens to, from;
  int64_t heads, head_size, count;
  Dtype dtype;
  const int64_t *rows, *source;
};

// Throws std::out_of_range before anything is written if an index leaves its tensor.
void store(const Store& s);

// Index in the list of the first page that has an unpacked slab within tokens [low, high), or -1.
int64_t unpacked_page(const Layout& l, const uint8_t* records, int64_t page_stride, int64_t listed,
                      const int64_t* page_ids, const int64_t* low, const int64_t* high);

// Returns how many elements were replaced, as formats/parts/quant.py's `sanitize` counts them. Throws std::out_of_range
// before anything is written if an index leaves its tensor.
int64_t pack(const Pack& p);

}  // namespace kvq

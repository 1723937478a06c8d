// Packing without Python: full-precision tokens, wherever they lie, into slabs of pages.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "../call.h"
#include "../pages.h"
#include "../tokens.h"

namespace kvq {

// `count` units of `tokens` tokens each: unit i is unit[i] of page[i], rows (count, tokens) are rows of the old tokens
// first, then of the fresh ones. owner[i] is the row of the state that it uses; follows[i]: its page was started earlier
// and keeps its parameters. position[i] is that of its first token.
struct Units {
  int64_t count, tokens;
  const int64_t *page, *unit, *rows, *owner;
  const uint8_t* follows;
  const int64_t* position;
};

struct Pack {
  Layout layout;
  Constants constants;
  Pool pool;
  Units units;
  Tokens old, fresh;
  Dtype dtype;
  const float* state;  // (owners, heads, state_rows, d), null where the keys follow none
  int64_t owners, state_rows;
  Team team;
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

// Index in the list of the first page that has an unpacked slab among its attended ones, or -1.
int64_t unpacked_page(const Layout& l, const Pool& pool, const PageList& list);

// Returns how many elements were replaced, as formats/parts/quant.py's `sanitize` counts them. Throws std::out_of_range
// before anything is written if an index leaves its tensor.
int64_t pack(const Pack& p);

}  // namespace kvq

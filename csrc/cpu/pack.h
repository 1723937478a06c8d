// Packing without Python: raw tokens, wherever they lie, into slabs of pages; and what a prompt leaves as state.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "attend.h"

namespace kvq {

struct Pack {
  Layout layout;
  Constants constants;
  uint8_t* records;  // (pages, heads), strides in bytes
  int64_t pages, heads, page_stride, head_stride;
  // Unit i is unit[i] of page[i], of `unit_tokens` tokens; rows (units, unit_tokens) are rows of `old` first, then of
  // `fresh`. owner[i] is the row of `state` that it follows; follows[i]: its page was begun earlier and keeps its
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

// Returns how many elements were replaced, as formats/quant.py's `sanitize` counts them. Throws std::out_of_range
// before anything is written if an index leaves its tensor.
int64_t pack(const Pack& p);

// Of all rows x of a chunk, (tokens, rows of a head, d) per KV head: the Gram matrix sum x x^T (SQuat), its diagonal
// (QJL's keys), or the largest magnitude per channel (InnerQ's keys). Elements are sanitized as everywhere.
struct Reduce {
  int64_t tokens, heads, group, head_size, d;  // query heads of KV head h: h * group ..
  const void* rows;
  Dtype dtype;
  int64_t strides[2];  // token, head
  double* sums;        // gram: (heads, d, d), squares: (heads, d)
  float* top;          // (heads, d)
  int threads, isa;
};

void gram(const Reduce& r);
void squares(const Reduce& r);
void largest(const Reduce& r);

// One pack unit of one KV head as its kernel sees it: sanitized tokens, [tokens][d].
struct PackUnit {
  const Layout* layout;
  const Constants* constants;
  int64_t tokens;
  const float *key, *value;
  uint8_t* record;
  uint8_t* slabs;      // of the unit
  const float* state;  // [state_rows][d] or null
  const float* pull;   // SQuat: M_{t-1} U_t of blocks 2 .. T, [state_rows][d], the first block's columns unused
  int64_t state_rows;
  bool follows;
  char* work;          // `work_bytes`, 64-byte aligned
};

struct PackIsa {
  // head_size elements to float32, sanitized, zeros up to d; returns how many were replaced
  int64_t (*read)(const void* from, Dtype dtype, int64_t head_size, int64_t d, float* to);
  size_t (*work_bytes)(const Layout&, int64_t tokens);
  void (*pack)(const PackUnit&);
  // rows^T rows, the upper triangle (in blocks of 32) of sum, [d][d]
  void (*gram)(const float* rows, int count, int64_t d, float* sum);
  // of rows [count][d]: sum += x^2 per channel, and top = max(top, |x|)
  void (*squares)(const float* rows, int count, int64_t d, double* sum);
  void (*largest)(const float* rows, int count, int64_t d, float* top);
};

extern const PackIsa portable_pack;
#if defined(__x86_64__)
extern const PackIsa avx2_pack;
extern const PackIsa avx512bw_pack;
extern const PackIsa avx512_pack;
#endif

inline const PackIsa& pack_isa(int level) {
#if defined(__x86_64__)
  if (level == 3) return avx512_pack;
  if (level == 2) return avx512bw_pack;
  if (level == 1) return avx2_pack;
#endif
  (void)level;
  return portable_pack;
}

}  // namespace kvq

// The interface between the driver (attend/attend.cpp) and the kernels of one instruction set.
//
// A task is one KV head of one request, up to ROWS of its query rows and a run of pages. The driver feeds it blocks of
// up to BLOCK_SLABS slabs; for every block
//
//     keys->score      S = q K^T                                   for all rows
//     cap              S = c tanh(S / c)                           if the model has a soft cap
//     softmax          m' = max(m, max S),  P = 2^(S - m'),  l = l 2^(m - m') + sum P,  O = O 2^(m - m')
//     values->add      O = O + P V
//
// with queries premultiplied by scale * log2(e), so that 2^x serves as the exponential.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../layout.h"
#include "../scratch.h"

namespace kvq {

constexpr int ROWS = 64;
constexpr int MOST_SIGNS = 1024;  // rows of a sketch that integer kernels support: 16 bits must hold a sum of all

struct Slab {
  const uint8_t* page;  // start of the record
  const uint8_t* data;  // start of the slab
  int nth;              // of the page's slabs
  int low, high;        // tokens [low, high) of the slab are attended
};

// The slabs of the next block. Kernels prefetch a few of their cache lines at every step, the keys' kernel about half
// and the values' the rest: the hardware can't guess the next page, and all lines at once would be more than it fetches
// at a time.
struct Prefetch {
  const char* at = nullptr;
  const char* end = nullptr;
  const Slab* next = nullptr;
  const Slab* last = nullptr;
  int64_t slab_bytes = 0;

  // The next `count` lines, for the caller to prefetch one by one. Up to count - 1 of them lie beyond the end, which is
  // harmless because a prefetch can't fault. When nothing is left, lines that are in the cache anyway.
  template <int COUNT>
  __attribute__((always_inline)) const char* take() {
    return take(COUNT);
  }
  __attribute__((always_inline)) const char* take(int count) {
    if (at >= end) {
      if (next == last) return reinterpret_cast<const char*>(this);
      // a page's first slab with what lies before it, the page's own parameters
      const bool first = next->data - next->page < slab_bytes;
      at = reinterpret_cast<const char*>(first ? next->page : next->data);
      end = reinterpret_cast<const char*>(next->data) + slab_bytes;
      ++next;
    }
    const char* lines = at;
    at += 64 * count;
    // a page's slabs follow each other, so go on with the next one: no line twice, none left out
    if (at > end && next != last && reinterpret_cast<const char*>(next->data) == end) {
      end += slab_bytes;
      ++next;
    }
    return lines;
  }

  template <int COUNT>
  __attribute__((always_inline)) void lines() {
    const char* from = take<COUNT>();
    for (int i = 0; i < COUNT; ++i) __builtin_prefetch(from + 64 * i, 0, 3);
  }

  __attribute__((always_inline)) void everything() {
    while (at < end || next != last) lines<8>();
  }
};

struct Task {
  const Layout* layout;
  const Constants* constants;
  int rows;
  float unit;             // scale * log2(e) if queries are not premultiplied (ManyKernel), else 1
  float cap;              // the soft cap of scores, times log2(e); 0: none
  const float* query;     // [rows][d]
  const float* features;  // of QJL and of transformed keys, [rows][projected]
  float* scores;          // [rows][BLOCK]
  float* out;             // [rows][d]
  float* top;             // [rows]  m
  float* total;           // [rows]  l
  char* key_work;         // key_bytes and value_bytes of the kernels, 64-byte aligned, private to the thread
  char* value_work;
  const uint8_t* prepared;  // the page that key_work was prepared for, null at first
  Prefetch prefetch;
};

struct KeyKernel {
  size_t (*work_bytes)(const Layout&);
  void (*begin)(Task&);
  void (*score)(Task&, const Slab*, int count);  // scores of slab i into columns 32 i .. 32 i + 31 of every row
  bool integer;                                  // built for this layout; the float32 kernels serve any, slowly
  bool tiles = false;                            // needs TileKernels::begin
};

struct ValueKernel {
  size_t (*work_bytes)(const Layout&);
  void (*add)(Task&, const Slab*, int count);
  bool integer;
  bool tiles = false;
};

// KeyKernel::score of a kernel that takes one slab and its first column.
template <void (*score)(Task&, const Slab&, int column)>
static void each_slab(Task& task, const Slab* slabs, int count) {
  for (int i = 0; i < count; ++i) score(task, slabs[i], i * SLAB);
}

constexpr int RAW_AHEAD = 8;  // full-precision tokens whose keys are on their way while one is multiplied

// A head's tokens lie a whole token apart, too far for any hardware prefetcher. Always inlined: a call that does
// nothing but prefetch has no effect that g++ would keep.
static inline __attribute__((always_inline)) void prefetch_token(const void* token, int bytes) {
  for (int at = 0; token && at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(token) + at);
}

// Up to 32 full-precision tokens of a KV head and up to ROWS of its query rows, with the same running softmax.
struct RawTask {
  int rows, first_row, group;  // row r of the task is query (first_row + r) / group
  int head_size, d;            // d: head_size rounded up to 32
  Dtype dtype;
  int tokens;
  const void* key[SLAB];       // null where a token is absent
  const void* value[SLAB];
  bool gathered;               // `work` holds the keys and values already
  bool all_seen;               // 32 tokens, none absent, and every query sees them
  const uint8_t* seen;         // seen[query * seen_stride + token]
  int64_t seen_stride;
  const float* query;          // [rows][d]
  const uint16_t* query_bits;  // the same before `unit` = scale * log2(e), [rows][d] bf16; null: not to be used
  float unit;
  float cap;                   // as in Task
  float* work;                 // 2 [32][d] + [rows][32]
  float *out, *top, *total;    // as in Task
};

// Attention of many rows, at least `rows`, to packed blocks: all of a block at once. Task.rows has no limit, scores is
// for ROWS of them, and key_work has work_bytes.
struct ManyKernel {
  int64_t (*rows)(const Layout&);
  size_t (*work_bytes)(const Layout&, int64_t rows);
  void (*begin)(Task&);
  void (*attend)(Task&, const Slab*, int count);
  bool scaled;  // queries come premultiplied, as elsewhere; else as they are, and Task.unit is left to the kernel
};

// Attention as one instruction set does it (isa.h). `keys` and `values` always find a kernel.
struct AttendKernels {
  KeyKernel (*keys)(const Layout&, int rows);
  ValueKernel (*values)(const Layout&, int rows);
  void (*cap)(float* scores, int64_t stride, int rows, int width, float cap);
  void (*softmax)(Task&, const Slab*, int count);
  void (*add_raw)(RawTask&);
  // the features of `rows` queries [rows][d]
  void (*project)(const Layout&, const Constants&, const float* query, int rows, float* features);
  ManyKernel many;
};

// In place of `keys` and `values` on a processor with products of tiles of bytes. Tasks of a kernel that says `tiles`
// begin and end with these.
struct TileKernels {
  KeyKernel (*keys)(const Layout&, int rows);
  ValueKernel (*values)(const Layout&, int rows);
  void (*begin)(const Layout&, int rows);
  void (*end)();
};

}  // namespace kvq

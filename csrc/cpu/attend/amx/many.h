//     S = q k,  P = 2^(u S - m),  O = O + P v          u: scale * log2(e)
//
// Many query rows on a processor with AMX: a block of slabs becomes tiles of bf16 numbers once (factors.h) and is
// multiplied with all rows, 32 at a time. q are the model's own bf16 numbers, P is rounded to bf16, and all sums are
// float32, as in vLLM's kernel for a 16-bit cache.
#pragma once

#include "../vnni/softmax.h"
#include "factors.h"
#include "transformed.h"

namespace {
namespace amx {

constexpr int TOGETHER = 2 * TILE_ROWS;  // rows

inline int64_t padded(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

// key_work, in bf16: queries [rows][d], weights [TOGETHER][BLOCK], keys and values of a block (factors.h), and the matrix
// of transformed keys (transformed.h); then what unpacking needs.
struct Work {
  uint16_t *query, *weights, *keys, *values, *matrix;
  float* unpacked;

  Work(const Layout& l, int64_t rows, char* memory) {
    query = reinterpret_cast<uint16_t*>(memory);
    weights = query + padded(rows) * l.d;
    keys = weights + TOGETHER * BLOCK;
    values = keys + l.d * BLOCK;
    matrix = values + l.d * BLOCK;
    unpacked = reinterpret_cast<float*>(matrix + matrix_halves(l));
  }
  static size_t bytes(const Layout& l, int64_t rows) {
    const int64_t halves = padded(rows) * l.d + TOGETHER * BLOCK + 2 * l.d * BLOCK + matrix_halves(l);
    return align64(2 * size_t(halves) + 4 * float32::slab_floats(l));
  }
};

inline void begin(Task& task) {
  const Layout& l = *task.layout;
  const Work work(l, task.rows, task.key_work);
  const int64_t count = int64_t(task.rows) * l.d;
  for (int64_t i = 0; i < count; i += PAIRS)
    store_rounded(work.query + i, load(task.query + i), load(task.query + i + LANES));
  std::memset(work.query + count, 0, 2 * size_t(padded(task.rows) * l.d - count));
  if (l.keys == Keys::transformed) split_matrix(l, *task.constants, work.matrix);
}

// A block's keys and values as factors, d * SLAB numbers each per slab.
inline void put_factors(Task& task, const Slab* slabs, int count, const Work& work) {
  const Layout& l = *task.layout;
  const int d = int(l.d), size = d * SLAB;
  float *first = work.unpacked, *second = first + size;
  for (int s = 0; s < count; ++s) {
    uint16_t* keys = work.keys + s * size;
    if (l.keys == Keys::transformed)
      rebuild(l, *task.constants, slabs[s], work.matrix, keys, second, first);
    else
      float32::unpack_any_keys(task, slabs[s], second, first);
    put_keys(first, d, keys);
    float32::unpack_values(l, slabs[s], first);
    put_values(slabs[s], first, d, work.values + s * size);
  }
}

// TWO: there are more than TILE_ROWS rows. The others' registers are not in the shape.
template <bool TWO>
inline void score(const Work& work, const uint16_t* query, int d, int count, float* scores) {
  using namespace tiles;
  for (int s = 0; s < count; ++s) {
    clear<sums(0, 0)>();
    clear<sums(0, 1)>();
    if constexpr (TWO) clear<sums(1, 0)>(), clear<sums(1, 1)>();
    for (int c = 0; c < d; c += PAIRS) {
      const uint16_t* keys = work.keys + s * d * SLAB + c / PAIRS * 2 * TILE_NUMBERS;
      load_rows<left(0)>(query + c, 2 * d);
      load_rows<right(0)>(keys, TILE_BYTES);
      load_rows<right(1)>(keys + TILE_NUMBERS, TILE_BYTES);
      multiply_add<sums(0, 0), left(0), right(0)>();
      multiply_add<sums(0, 1), left(0), right(1)>();
      if constexpr (TWO) {
        load_rows<left(1)>(query + TILE_ROWS * d + c, 2 * d);
        multiply_add<sums(1, 0), left(1), right(0)>();
        multiply_add<sums(1, 1), left(1), right(1)>();
      }
    }
    float* to = scores + s * SLAB;
    store_rows<sums(0, 0)>(to, 4 * BLOCK);
    store_rows<sums(0, 1)>(to + TILE_ROWS, 4 * BLOCK);
    if constexpr (TWO) {
      store_rows<sums(1, 0)>(to + TILE_ROWS * BLOCK, 4 * BLOCK);
      store_rows<sums(1, 1)>(to + TILE_ROWS * BLOCK + TILE_ROWS, 4 * BLOCK);
    }
  }
}

// The running softmax of VNNI's kernels; the weights become bf16.
inline void weigh(Task& task, const Slab* slabs, int count, uint16_t* weights) {
  if (task.cap > 0) {
    for (int r = 0; r < task.rows; ++r)
      for (float *x = task.scores + r * BLOCK, *end = x + count * SLAB; x < end; x += LANES) store(x, load(x) * task.unit);
    float32::cap(task.scores, BLOCK, task.rows, count * SLAB, task.cap);
    task.unit = 1;
  }
  integer::softmax<true>(task, slabs, count, [&](int row, int token, const __m512(&p)[2]) KVQ_LAMBDA {
    store_rounded(weights + row * BLOCK + token, Floats(p[0]), Floats(p[1]));
  });
}

template <bool TWO>
inline void add(const Work& work, int d, int count, float* out) {
  using namespace tiles;
  for (int c = 0; c < d; c += PAIRS) {
    load_rows<sums(0, 0)>(out + c, 4 * d);
    load_rows<sums(0, 1)>(out + c + TILE_ROWS, 4 * d);
    if constexpr (TWO) {
      load_rows<sums(1, 0)>(out + TILE_ROWS * d + c, 4 * d);
      load_rows<sums(1, 1)>(out + TILE_ROWS * d + c + TILE_ROWS, 4 * d);
    }
    for (int s = 0; s < count; ++s) {
      const uint16_t* values = work.values + s * d * SLAB + c / TILE_ROWS * TILE_NUMBERS;
      load_rows<left(0)>(work.weights + s * SLAB, 2 * BLOCK);
      load_rows<right(0)>(values, TILE_BYTES);
      load_rows<right(1)>(values + TILE_NUMBERS, TILE_BYTES);
      multiply_add<sums(0, 0), left(0), right(0)>();
      multiply_add<sums(0, 1), left(0), right(1)>();
      if constexpr (TWO) {
        load_rows<left(1)>(work.weights + TILE_ROWS * BLOCK + s * SLAB, 2 * BLOCK);
        multiply_add<sums(1, 0), left(1), right(0)>();
        multiply_add<sums(1, 1), left(1), right(1)>();
      }
    }
    store_rows<sums(0, 0)>(out + c, 4 * d);
    store_rows<sums(0, 1)>(out + c + TILE_ROWS, 4 * d);
    if constexpr (TWO) {
      store_rows<sums(1, 0)>(out + TILE_ROWS * d + c, 4 * d);
      store_rows<sums(1, 1)>(out + TILE_ROWS * d + c + TILE_ROWS, 4 * d);
    }
  }
}

template <bool TWO>
inline void attend_rows(Task& part, const Work& work, const uint16_t* query, const Slab* slabs, int count) {
  const int d = int(part.layout->d);
  score<TWO>(work, query, d, count, part.scores);
  weigh(part, slabs, count, work.weights);
  add<TWO>(work, d, count, part.out);
}

// `task.rows` is not limited; `task.scores` is for ROWS of them, `task.key_work` has Work::bytes.
inline void many(Task& task, const Slab* slabs, int count) {
  const int d = int(task.layout->d);
  const Work work(*task.layout, task.rows, task.key_work);
  tiles::take_shape(tiles::shape_for(TILE_ROWS, TILE_ROWS));
  put_factors(task, slabs, count, work);
  Task part = task;
  for (int first = 0; first < task.rows; first += TOGETHER) {
    part.unit = task.unit;
    part.rows = task.rows - first < TOGETHER ? task.rows - first : TOGETHER;
    part.out = task.out + first * d;
    part.top = task.top + first;
    part.total = task.total + first;
    const bool two = part.rows > TILE_ROWS;
    if (part.rows < TOGETHER)
      tiles::take_shape(two ? tiles::shape_for(TILE_ROWS, part.rows - TILE_ROWS) : tiles::shape_for(part.rows, 0));
    const uint16_t* query = work.query + int64_t(first) * d;
    two ? attend_rows<true>(part, work, query, slabs, count) : attend_rows<false>(part, work, query, slabs, count);
  }
  tiles::release();  // what is in the registers would be saved at every switch of threads
}

}  // namespace amx
}  // namespace

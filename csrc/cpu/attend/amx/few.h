//     sums[r][n] = sum_k (256 hi[r][k] + lo[r][k]) codes[k][n]
//
// Products of up to ROWS rows in fixed point (isa/vnni.h) with codes, 32 columns at a time. Codes are unpacked into tiles
// once for all rows. A left tile has eight rows, four at a time: their high bytes, then their low ones. It may have rows
// that are no rows of the task; their sums are ignored.
//
// Measured on a processor with AMX: a tile that is loaded right after its bytes were stored waits longer than a product
// takes, and so do sums that are read back at once. `by_turns` puts other work between them.
#pragma once

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"
#include "../../isa/tiles.h"

namespace {
namespace amx {

using namespace kvq;
using namespace unrolled;
using integer::L;
using integer::PARTS;
using tiles::TILE_BYTES;
using tiles::TILE_ROWS;

constexpr int FEW = TILE_ROWS / PARTS;  // rows of a left tile
constexpr int TILE = TILE_ROWS * TILE_BYTES;
constexpr int COLUMNS = 2 * TILE_ROWS;
constexpr int SUMS_OF_FEW = 2 * TILE_ROWS * TILE_ROWS;

inline int left_tiles(int rows) { return (rows + FEW - 1) / FEW; }

inline int left_lines(int rows) {
  if (rows <= 0) return 0;
  return rows > 4 ? TILE_ROWS : TILE_ROWS / 2;
}

// For any product of as many rows. Of more than two left tiles all have the most lines.
inline tiles::Shape few_shape(int rows) { return tiles::shape_for(left_lines(rows), left_lines(rows - FEW)); }

// [rows][COLUMNS], as tiles leave it: of eight rows at a time, 16 columns, the lines of the left tile.
struct FewSums {
  int32_t* at;

  KVQ_INLINE __m512 of(int row, int half) const {
    const int32_t* hi = at + (row / FEW * 2 + half) * TILE_ROWS * TILE_ROWS + (row % FEW / 4 * 8 + row % 4) * TILE_ROWS;
    return integer::to_reals(integer::join(L::load_bytes(hi), L::load_bytes(hi + 4 * TILE_ROWS)));
  }
};

// Right tiles: `half` bytes apart, each 16 columns.
struct Codes {
  uint8_t* at;
  int64_t half;

  KVQ_INLINE uint8_t* line(int half_number, int k) const { return at + half_number * half + k * TILE_BYTES; }
};

// TWO: two left tiles.
template <bool TWO>
inline void multiply_tiles(const int8_t* left_bytes, int64_t stride, const Codes& codes, int count, int32_t* to) {
  using namespace tiles;
  clear<sums(0, 0)>();
  clear<sums(0, 1)>();
  if constexpr (TWO) clear<sums(1, 0)>(), clear<sums(1, 1)>();
  for (int k = 0; k < count; ++k) {
    load_rows<left(0)>(left_bytes + k * TILE_BYTES, stride);
    load_rows<right(0)>(codes.at + k * TILE, TILE_BYTES);
    load_rows<right(1)>(codes.at + codes.half + k * TILE, TILE_BYTES);
    multiply_add_bytes<sums(0, 0), left(0), right(0)>();
    multiply_add_bytes<sums(0, 1), left(0), right(1)>();
    if constexpr (TWO) {
      load_rows<left(1)>(left_bytes + TILE_ROWS * stride + k * TILE_BYTES, stride);
      multiply_add_bytes<sums(1, 0), left(1), right(0)>();
      multiply_add_bytes<sums(1, 1), left(1), right(1)>();
    }
  }
  store_rows<sums(0, 0)>(to, TILE_BYTES);
  store_rows<sums(0, 1)>(to + SUMS_OF_FEW / 2, TILE_BYTES);
  if constexpr (TWO) {
    store_rows<sums(1, 0)>(to + SUMS_OF_FEW, TILE_BYTES);
    store_rows<sums(1, 1)>(to + SUMS_OF_FEW + SUMS_OF_FEW / 2, TILE_BYTES);
  }
}

// Rows of bytes `stride` apart, and `count` pairs of right tiles.
inline void multiply(int rows, const int8_t* bytes, int64_t stride, const Codes& codes, int count, FewSums to) {
  for (int row = 0; row < rows; row += 2 * FEW) {
    const int8_t* from = bytes + PARTS * row * stride;
    int32_t* sums = to.at + row / FEW * SUMS_OF_FEW;
    rows - row > FEW ? multiply_tiles<true>(from, stride, codes, count, sums)
                     : multiply_tiles<false>(from, stride, codes, count, sums);
  }
}

// For every i < count in this order: prepare(i), multiply(i), finish(i), the next one prepared before one is multiplied,
// and the sums of one read after the next product. So prepare(i + 1) comes before finish(i - 1).
template <class Prepare, class Multiply, class Finish>
inline void by_turns(int count, Prepare prepare, Multiply multiply, Finish finish) {
  prepare(0);
  for (int i = 0; i < count; ++i) {
    if (i + 1 < count) prepare(i + 1);
    multiply(i);
    if (i) finish(i - 1);
  }
  finish(count - 1);
}

// A task's arrays one after the other, so that those of few rows stay in the first-level cache; without memory, only how
// long they are.
struct Arrays {
  char* memory;
  size_t used = 0;

  template <class T>
  T* take(size_t count) {
    char* at = memory ? memory + used : nullptr;
    used += align64(count * sizeof(T));
    return reinterpret_cast<T*>(at);
  }
  int8_t* take_rows(int rows, int bytes) { return take<int8_t>(size_t(left_tiles(rows)) * TILE_ROWS * bytes); }
  Codes take_codes(int count) { return {take<uint8_t>(size_t(2 * count) * TILE), int64_t(count) * TILE}; }
  FewSums take_sums(int rows) { return {take<int32_t>(size_t(left_tiles(rows)) * SUMS_OF_FEW)}; }
};

template <class Work>
inline size_t bytes_of(const Layout& l) {
  Arrays arrays{nullptr};
  Work(l, ROWS, arrays);
  return arrays.used;
}

template <class Work>
inline Work work_of(const Task& task, char* memory) {
  Arrays arrays{memory};
  return Work(*task.layout, task.rows, arrays);
}

}  // namespace amx
}  // namespace

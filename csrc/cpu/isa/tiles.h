//     C[m][n] += sum_k A[m][2 k] B[k][2 n] + A[m][2 k + 1] B[k][2 n + 1]          A, B: bf16, C: float32
//     C[m][n] += sum_k sum_i<4 A[m][4 k + i] B[k][4 n + i]                        A: int8, B: uint8, C: int32
//
// The eight tile registers of AMX, 16 rows of 64 bytes each: a pair of C tiles in columns for each of two A tiles, and
// two B tiles. In assembly, because g++ 12's intrinsics do not tell the compiler what memory they read.
//
// KVQ_EMULATED_TILES: arrays in place of registers, for processors without AMX. What a processor would refuse throws.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace {
namespace tiles {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;
constexpr int PAIRS = 2 * TILE_ROWS;  // bf16 numbers of a row

constexpr int sums(int a, int b) { return 2 * a + b; }
constexpr int left(int a) { return 4 + a; }
constexpr int right(int b) { return 6 + b; }

// What ldtilecfg reads. A register without rows can't be used.
struct alignas(64) Shape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count) {
    rows[tile] = uint8_t(count);
    row_bytes[tile] = count ? TILE_BYTES : 0;
  }
};
static_assert(sizeof(Shape) == 64, "ldtilecfg reads 64 bytes");

// `first` and `second` rows of the two A tiles, at most TILE_ROWS; second may be 0.
inline Shape shape_for(int first, int second) {
  Shape shape;
  for (int b = 0; b < 2; ++b) {
    shape.set(sums(0, b), first);
    shape.set(sums(1, b), second);
    shape.set(right(b), TILE_ROWS);
  }
  shape.set(left(0), first);
  shape.set(left(1), second);
  return shape;
}

#ifdef KVQ_EMULATED_TILES

struct Registers {
  bool there = false;
  Shape shape;
  uint8_t bytes[8][TILE_ROWS][TILE_BYTES];
};

inline Registers& registers() {
  static thread_local Registers all;
  return all;
}

inline void refuse_unless(bool good, const char* why) {
  if (!good) throw std::logic_error(why);
}

inline int rows_of(int tile) {
  const Registers& r = registers();
  refuse_unless(r.there, "a tile is used without a shape");
  refuse_unless(r.shape.rows[tile] && r.shape.row_bytes[tile], "a tile without rows is used");
  return r.shape.rows[tile];
}

inline void take_shape(const Shape& shape) {
  refuse_unless(shape.palette == 1 && shape.start_row == 0, "palette 1 is the only one");
  for (int t = 0; t < 16; ++t) {
    refuse_unless(shape.rows[t] <= (t < 8 ? TILE_ROWS : 0) && shape.row_bytes[t] <= TILE_BYTES, "a tile is too large");
    refuse_unless((shape.rows[t] == 0) == (shape.row_bytes[t] == 0), "a tile has rows without bytes");
  }
  registers() = {};
  registers().there = true;
  registers().shape = shape;
}

inline void release() { registers().there = false; }

template <int TILE>
inline void clear() {
  rows_of(TILE);
  std::memset(registers().bytes[TILE], 0, sizeof registers().bytes[TILE]);
}

template <int TILE>
inline void load_rows(const void* from, int64_t stride) {
  const int rows = rows_of(TILE);
  clear<TILE>();
  for (int i = 0; i < rows; ++i)
    std::memcpy(registers().bytes[TILE][i], static_cast<const char*>(from) + i * stride, TILE_BYTES);
}

template <int TILE>
inline void store_rows(void* to, int64_t stride) {
  for (int i = 0; i < rows_of(TILE); ++i)
    std::memcpy(static_cast<char*>(to) + i * stride, registers().bytes[TILE][i], TILE_BYTES);
}

// Subnormal numbers count as 0, as on the processor.
inline float widened(uint16_t x) {
  const uint32_t bits = (x & 0x7f80) ? uint32_t(x) << 16 : uint32_t(x & 0x8000) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

template <int C, int A, int B>
inline void refuse_shapes() {
  refuse_unless(rows_of(C) == rows_of(A), "the sums have other rows than the left factor");
  refuse_unless(rows_of(B) == TILE_ROWS, "the right factor has other rows than the left one has words");
}

template <int C, int A, int B>
inline void multiply_add() {
  refuse_shapes<C, A, B>();
  float b[TILE_ROWS][PAIRS], c[TILE_ROWS];
  for (int k = 0; k < TILE_ROWS; ++k)
    for (int n = 0; n < PAIRS; ++n) {
      uint16_t x;
      std::memcpy(&x, registers().bytes[B][k] + 2 * n, 2);
      b[k][n] = widened(x);
    }
  for (int m = 0; m < rows_of(A); ++m) {
    std::memcpy(c, registers().bytes[C][m], sizeof c);
    for (int k = 0; k < TILE_ROWS; ++k) {
      uint16_t a[2];
      std::memcpy(a, registers().bytes[A][m] + 4 * k, 4);
      for (int n = 0; n < TILE_ROWS; ++n) c[n] += widened(a[0]) * b[k][2 * n] + widened(a[1]) * b[k][2 * n + 1];
    }
    std::memcpy(registers().bytes[C][m], c, sizeof c);
  }
}

template <int C, int A, int B>
inline void multiply_add_bytes() {
  refuse_shapes<C, A, B>();
  const auto& right = registers().bytes[B];
  int32_t c[TILE_ROWS];
  int8_t a[TILE_BYTES];
  for (int m = 0; m < rows_of(A); ++m) {
    std::memcpy(c, registers().bytes[C][m], sizeof c);
    std::memcpy(a, registers().bytes[A][m], sizeof a);
    for (int k = 0; k < TILE_ROWS; ++k)
      for (int i = 0; i < 4; ++i)
        for (int n = 0; n < TILE_ROWS; ++n) c[n] += a[4 * k + i] * right[k][4 * n + i];
    std::memcpy(registers().bytes[C][m], c, sizeof c);
  }
}

#else

inline void take_shape(const Shape& shape) { asm volatile("ldtilecfg %0" ::"m"(shape) : "memory"); }
inline void release() { asm volatile("tilerelease" ::: "memory"); }

template <int TILE>
inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
inline void load_rows(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store_rows(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int C, int A, int B>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void multiply_add_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace tiles
}  // namespace

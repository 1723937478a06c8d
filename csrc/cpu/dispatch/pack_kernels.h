// The interface between the drivers (pack/pack.cpp, pack/fit.cpp) and the kernels of one instruction set.
#pragma once

#include <cstddef>

#include "../layout.h"

namespace kvq {

constexpr int MAX_RANK = 64;  // of SQuat's subspace

// One pack unit of one KV head as its kernel sees it: sanitized tokens, [tokens][d].
struct PackUnit {
  const Layout* layout;
  const Constants* constants;
  int64_t tokens;
  const float *key, *value;
  uint8_t* record;
  uint8_t* slabs;      // of the unit
  const float* state;  // [state_rows][d] or null
  const float* pull;   // SQuat: M_{t-1} U_t of blocks 2 .. T, [rank][d], the first block's columns unused
  int64_t state_rows;
  bool follows;
  int64_t position;    // of its first token
  char* work;          // `work_bytes`, 64-byte aligned
};

// Packing as one instruction set does it (isa.h).
struct PackKernels {
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

}  // namespace kvq

// What `fit` sums over a prompt, so its state needs no second pass over the tokens.
#pragma once

#include "../call.h"

namespace kvq {

// For all rows x of a chunk, (tokens, rows of a head, d) per KV head: the Gram matrix sum x x^T (SQuat), its diagonal
// (QJL's keys), or the largest magnitude per channel (InnerQ's keys). Elements are sanitized as everywhere.
struct Reduce {
  int64_t tokens, heads, group, head_size, d;  // query heads of KV head h: h * group ..
  const void* rows;
  Dtype dtype;
  int64_t strides[2];  // token, head
  double* sums;        // gram: (heads, d, d), squares: (heads, d)
  float* top;          // (heads, d)
  Team team;
};

void gram(const Reduce& r);
void squares(const Reduce& r);
void largest(const Reduce& r);

}  // namespace kvq

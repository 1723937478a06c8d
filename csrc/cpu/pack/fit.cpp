// The driver of the sums that `fit` needs: one task per KV head, chunk by chunk.
#include "fit.h"

#include <algorithm>

#include "../dispatch/isa.h"
#include "../scratch.h"
#include "../threads.h"
#include "../tokens.h"

namespace kvq {
namespace {

constexpr int CHUNK_ROWS = 256;  // summed in float32 before they are added in float64

// Calls body(head, rows, count, room) with all rows of a head, at most CHUNK_ROWS at a time, as float32 [count][d];
// `room` holds d x d numbers more.
template <class Body>
void by_chunks(const Reduce& r, const PackKernels& kernels, int64_t head, Body&& body) {
  thread_local Scratch scratch;
  float* rows = reinterpret_cast<float*>(scratch.reserve(4 * size_t((CHUNK_ROWS + r.d) * r.d)));
  const int64_t total = r.tokens * r.group;
  for (int64_t first = 0; first < total; first += CHUNK_ROWS) {
    const int count = int(std::min<int64_t>(total - first, CHUNK_ROWS));
    for (int i = 0; i < count; ++i) {
      const int64_t row = first + i;
      const int64_t at = row / r.group * r.strides[0] + (head * r.group + row % r.group) * r.strides[1];
      kernels.read(element(r.rows, r.dtype, at), r.dtype, r.head_size, r.d, rows + i * r.d);
    }
    body(rows, count, rows + CHUNK_ROWS * r.d);
  }
}

}  // namespace

void gram(const Reduce& r) {
  const PackKernels& kernels = isa(r.team.isa).pack;
  parallel(r.team.threads, r.heads, [&](int64_t head) {
    double* out = r.sums + head * r.d * r.d;
    std::fill_n(out, r.d * r.d, 0.0);
    by_chunks(r, kernels, head, [&](const float* rows, int count, float* sum) {
      kernels.gram(rows, count, r.d, sum);
      for (int64_t i = 0; i < r.d; ++i)
        for (int64_t j = i / SLAB * SLAB; j < r.d; ++j) out[i * r.d + j] += sum[i * r.d + j];
    });
    for (int64_t i = 0; i < r.d; ++i)
      for (int64_t j = 0; j < i; ++j) out[i * r.d + j] = out[j * r.d + i];
  });
}

void squares(const Reduce& r) {
  const PackKernels& kernels = isa(r.team.isa).pack;
  parallel(r.team.threads, r.heads, [&](int64_t head) {
    std::fill_n(r.sums + head * r.d, r.d, 0.0);
    by_chunks(r, kernels, head,
              [&](const float* rows, int count, float*) { kernels.squares(rows, count, r.d, r.sums + head * r.d); });
  });
}

void largest(const Reduce& r) {
  const PackKernels& kernels = isa(r.team.isa).pack;
  parallel(r.team.threads, r.heads, [&](int64_t head) {
    std::fill_n(r.top + head * r.d, r.d, 0.0f);
    by_chunks(r, kernels, head,
              [&](const float* rows, int count, float*) { kernels.largest(rows, count, r.d, r.top + head * r.d); });
  });
}

}  // namespace kvq

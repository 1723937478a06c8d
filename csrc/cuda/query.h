// Sketches the queries once per step: S q in float32, and the operand for the outlier channels of the first slab that
// each program will read. One block per program and 128 sketch rows (the outlier sketch last), one thread per row.
#pragma once

#include "operand.h"

namespace kvq {

template <int D, int TILES>
KVQ_GLOBAL(128, 4)
query_kernel(const QueryParams p) {
  using S = Slab<D>;
  constexpr int ROWS = 8 * TILES;
  const int program = block_x(), chunk = block_y(), thread = thread_index();
  const int head = program % p.rows.heads, tile = program / p.rows.heads % p.rows.tiles;
  const int request = program / p.rows.heads / p.rows.tiles;
  float* q = reinterpret_cast<float*>(shared_memory());  // [D][ROWS]
  float* inverse = q + D * ROWS;                         // [ROWS]
  int* channels = reinterpret_cast<int*>(inverse + ROWS);

  for (int i = thread; i < D * ROWS; i += 128) {
    const int r = tile * ROWS + i / D, c = i % D;
    const int64_t token = token_of(p.rows, request, r);
    float x = 0.0f;
    if (token >= 0) {
      const int64_t row = token * p.token_stride + (int64_t(head) * p.rows.share + r % p.rows.share) * p.head_stride;
      x = clean(load_float(p.query, p.type, row + c));
    }
    to_shared(q + c * ROWS + i / D, x);
    if (chunk == 0) store(p.clean + (int64_t(program) * ROWS + i / D) * D + c, x);
  }
  if (thread < 4) {
    // the outlier channels of the first slab, if it can be read
    uint32_t word = ~0u;
    const Span span = span_of(p.table, p.pages, request);
    if (span.low < span.high) {
      const Place at = place_of(p.pages, span.low / SLAB);
      const uint8_t* record = record_of(p.table, p.pages, request, at.page, head);
      if (record && load(reinterpret_cast<const uint32_t*>(record)) == PAGE_MAGIC && load(record + FLAGS_AT + at.slab) == 1 &&
          thread < S::INDEX_WORDS)
        word = load(reinterpret_cast<const uint32_t*>(record + p.pages.slabs_at + at.slab * S::BYTES + S::KO_INDEX) +
                    thread);
    }
    if (chunk == 0) store(p.index + program * 4 + thread, word);
    if (thread < S::INDEX_WORDS)
      for (int i = 0; i < 4; ++i) to_shared(channels + 4 * thread + i, int((word >> (8 * i)) & 255) & (D - 1));
  }
  sync_block();
  if (thread < ROWS) {
    float sum = 0.0f;
    for (int c = 0; c < D; ++c) {
      const float x = from_shared<float>(q + c * ROWS + thread);
      sum = fused(x, x, sum);
    }
    const float norm = sum > 0.0f ? square_root(sum) : 1.0f;
    to_shared(inverse + thread, divide(1.0f, norm));
    if (chunk == 0) {
      const int64_t row = int64_t(program) * ROWS + thread;
      store(p.inverse + row, divide(1.0f, norm));
      store(p.unit + row, p.scale * 1.4426950408889634f * p.sketches.scale_inner * 131072.0f * norm);
    }
  }
  sync_block();

  constexpr int INNER_CHUNKS = S::M / 128 > 0 ? S::M / 128 : 1;
  const bool inner = chunk < INNER_CHUNKS;
  const int m = inner ? S::M : S::MO;
  const int i = (inner ? chunk : chunk - INNER_CHUNKS) * 128 + thread;
  if (i >= m) return;
  float sum[ROWS];
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
  if (inner) {
    KVQ_ROLLED for (int c = 0; c < D; c += 4) {
      KVQ_UNROLL for (int k = 0; k < 4; ++k) {
        const float s = load(p.sketches.inner + (c + k) * S::M + i);
        KVQ_UNROLL for (int r = 0; r < ROWS; r += 4) {
          const Float4 x = from_shared<Float4>(q + (c + k) * ROWS + r);
          sum[r] = fused(s, x.x, sum[r]);
          sum[r + 1] = fused(s, x.y, sum[r + 1]);
          sum[r + 2] = fused(s, x.z, sum[r + 2]);
          sum[r + 3] = fused(s, x.w, sum[r + 3]);
        }
      }
    }
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) store(p.sketched + (int64_t(program) * ROWS + r) * S::M + i, sum[r]);
  }
  KVQ_ROLLED for (int k = 0; k < S::N; ++k) {
    const int c = from_shared<int>(channels + k);
    const float s = inner ? -load(p.sketches.inner + c * S::M + i) : load(p.sketches.outer + k * S::MO + i);
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = fused(s, from_shared<float>(q + c * ROWS + r), sum[r]);
  }

  // the place of row i in the operand: the inverse of step_rows
  const int stride = m / 8, plane = i / stride, quad = i % stride / 4, byte = i % 4;
  int step, t, bit;
  if (m >= 128) {
    step = quad / 4 * 8 + plane;
    t = quad % 4;
    bit = plane;
  } else {
    step = plane % 4;
    t = quad + 2 * (plane / 4);
    bit = plane % 4;
  }
  if (!inner) step += S::INNER_STEPS;
  const float ratio = inner ? 1.0f : p.sketches.scale_outer / p.sketches.scale_inner;
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    const float h = sum[r] * (from_shared<float>(inverse + r) * plane_scale(bit) * ratio);
    const int lane_of = 4 * (r % 8) + t;
    // register byte % 2 (b0: bytes 0 and 2), half byte / 2
    const int at = (step >> 1) * 512 + lane_of * 16 + (step & 1) * 8 + (byte & 1) * 4 + (byte >> 1) * 2;
    store(reinterpret_cast<uint16_t*>(p.operand + (int64_t(program) * TILES + r / 8) * S::OPERAND_BYTES + at),
          float_to_half(h));
  }
}

}  // namespace kvq

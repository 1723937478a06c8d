// The query's side of the scores: its sketch as float16 operand of the matrix products.
//
//   x_i = <s_i, q without the outlier channels>,  h_i = x_i / |q| * 2^(8 - p)     sketch row i in plane p of its word
//
// A sign bit in place p of a 16-bit lane, read as float16, is bit * 2^(p - 24) exactly, and |x_i| <= sqrt(d) |q|, so
// nothing overflows and sum_i bit_i h_i 2^(p - 24) = 2^-16 / |q| * sum_i bit_i x_i.  With signs s = 2 bit - 1:
//
//   sum_i s_i x_i = 2^17 |q| (sum_i bit_i h_i 2^(p - 24) - half),   half = the same sum over all i, halved
//
// Operand bytes of 8 rows: [pair of steps][lane][b0, b1 of one step, b0, b1 of the next]. A lane (g, t) holds row g; in
// b0 the sketch rows of bytes 0 and 2 of its word, in b1 those of bytes 1 and 3.
#pragma once

#include "read.h"

namespace kvq {

// Sketch rows `row` .. `row + 3` of a step for lane t, and the place of their plane's bit in the (shifted) word.
struct StepRows {
  int row, bit;
};

template <int M>
KVQ_DEV StepRows step_rows(int step, int t) {
  if (M >= 128) return {(step & 7) * (M / 8) + 4 * (4 * (step >> 3) + t), step & 7};
  // 64 rows are two quads per plane: lanes 0 and 1 take planes 0 to 3, lanes 2 and 3 planes 4 to 7
  return {(step + 4 * (t >> 1)) * (M / 8) + 4 * (t & 1), step};
}

KVQ_DEV float plane_scale(int bit) { return float(256 >> bit); }

template <int D>
struct Outliers {
  int channel[Slab<D>::N];
  KVQ_DEV void read(const uint32_t (&words)[Slab<D>::INDEX_WORDS]) {
    KVQ_UNROLL for (int i = 0; i < Slab<D>::N; ++i) channel[i] = int((words[i / 4] >> (8 * (i % 4))) & 255) & (D - 1);
  }
};

// Builds the operand for other outlier channels, in shared memory; all lanes of a warp together.
template <int D, int TILES>
KVQ_DEV void build_operand(char* target, const AttendParams& p, int program, const Outliers<D>& out) {
  using S = Slab<D>;
  const int g = lane() >> 2, t = lane() & 3;
  KVQ_ROLLED for (int tile = 0; tile < TILES; ++tile) {
    const int64_t row = int64_t(program) * (8 * TILES) + 8 * tile + g;
    const float inverse = load(p.inverse + row);
    const float ratio = p.sketches.scale_outer / p.sketches.scale_inner;
    float q[S::N];
    KVQ_UNROLL for (int i = 0; i < S::N; ++i) q[i] = load(p.clean + row * D + out.channel[i]);
    KVQ_ROLLED for (int step = 0; step < S::STEPS; ++step) {
      const bool inner = step < S::INNER_STEPS;
      const StepRows at = inner ? step_rows<S::M>(step, t) : step_rows<S::MO>(step - S::INNER_STEPS, t);
      Float4 x{0.0f, 0.0f, 0.0f, 0.0f};
      if (inner) x = load(reinterpret_cast<const Float4*>(p.sketched + row * S::M + at.row));
      KVQ_UNROLL for (int i = 0; i < S::N; ++i) {
        const float* column = inner ? p.sketches.inner + out.channel[i] * S::M : p.sketches.outer + i * S::MO;
        const Float4 s = load(reinterpret_cast<const Float4*>(column + at.row));
        const float f = inner ? -q[i] : q[i];
        x.x = fused(s.x, f, x.x);
        x.y = fused(s.y, f, x.y);
        x.z = fused(s.z, f, x.z);
        x.w = fused(s.w, f, x.w);
      }
      const float f = inverse * plane_scale(at.bit) * (inner ? 1.0f : ratio);
      char* place = target + tile * S::OPERAND_BYTES + (step >> 1) * 512 + lane() * 16 + (step & 1) * 8;
      to_shared(place, Pair{pack_halves(x.x * f, x.z * f), pack_halves(x.y * f, x.w * f)});
    }
  }
}

}  // namespace kvq

// The integer kernels by products of tiles (see ../integer/choose.h). What they do not serve is left to VNNI's.
#pragma once

#include "../../dispatch/isa.h"
#include "../integer/choose.h"
#include "digit_keys.h"
#include "folded_keys.h"
#include "hybrid_keys.h"
#include "hybrid_values.h"
#include "token_values.h"

// Not measured: with fewer rows, storing unpacked codes is expected to cost more than VNNI's products. Those whose sums
// stay apart need more.
#ifndef KVQ_LEAST_TILE_ROWS
#define KVQ_LEAST_TILE_ROWS 3
#endif

namespace {
namespace amx {

struct Set {
  static constexpr int LANES = integer::WIDTH;
  static constexpr bool TILES = true;
  using Elsewhere = unrolled::Elsewhere;
  template <int D, int BITS>
  using Channel = FoldedKeys<integer::ChannelKeys<D, BITS>>;
  template <int D>
  using Boosted = FoldedKeys<integer::BoostedKeys<D>>;
  template <int D>
  using Hybrid = HybridKeys<D>;
  using Sketch = Elsewhere;
  template <int D, int RADIUS_BITS>
  using Polar = Elsewhere;
  template <int D>
  using JoinedPolar = Elsewhere;
  template <int PLANE>
  using Transformed = DigitKeys<PLANE>;
  template <int BITS>
  using Token = TokenValues<BITS>;
  template <int BITS>
  using Searched = TokenValues<BITS, true>;
  using HybridValues = amx::HybridValues;
  static KeyKernel other_keys(const Layout& l, int rows) { return avx512_isa.attend.keys(l, rows); }
  static ValueKernel other_values(const Layout& l, int rows) { return avx512_isa.attend.values(l, rows); }
};

inline int least_rows(bool halves) { return halves ? 2 * KVQ_LEAST_TILE_ROWS : KVQ_LEAST_TILE_ROWS; }

inline KeyKernel few_keys(const Layout& l, int rows) {
  return rows < least_rows(l.keys == Keys::hybrid) ? Set::other_keys(l, rows) : unrolled::choose_keys<Set>(l, rows);
}
inline ValueKernel few_values(const Layout& l, int rows) {
  return rows < least_rows(l.values == Values::hybrid) ? Set::other_values(l, rows) : unrolled::choose_values<Set>(l, rows);
}
inline void begin_few(const Layout& l, int rows) {
  const bool halves = l.keys == Keys::hybrid || l.values == Values::hybrid;
  tiles::take_shape(few_shape(halves ? rows_of_halves(rows) : rows));
}
inline void end_few() { tiles::release(); }

constexpr TileKernels few = {few_keys, few_values, begin_few, end_few};

}  // namespace amx
}  // namespace

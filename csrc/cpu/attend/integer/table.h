// The integer kernels of an instruction set. Its own table.h includes this after what only it has: HybridValues2,
// PolarKeys, SignSums and TokenValues.
#pragma once

#include "choose.h"
#include "boosted_keys.h"
#include "channel_keys.h"
#include "hybrid_keys.h"
#include "sketch_keys.h"
#include "transformed_keys.h"

namespace {
namespace integer {

struct Set {
  static constexpr int LANES = WIDTH;
  static constexpr bool TILES = false;
  template <int D, int BITS>
  using Channel = ChannelKeys<D, BITS>;
  template <int D>
  using Boosted = BoostedKeys<D>;
  template <int D>
  using Hybrid = HybridKeys2<D>;
  using Sketch = SketchKeys<SignSums>;
  template <int D, int RADIUS_BITS>
  using Polar = PolarKeys<D, RADIUS_BITS>;
  template <int D>
  using JoinedPolar = JoinedPolarKeys<PolarKeys<D, 4>>;
  template <int PLANE>
  using Transformed = TransformedKeys<PLANE>;
  template <int BITS>
  using Token = TokenValues<BITS>;
  template <int BITS>
  using Searched = TokenValues<BITS, true>;
  using HybridValues = HybridValues2;
  static KeyKernel other_keys(const Layout& l, int rows) { return float32::keys(l, rows); }
  static ValueKernel other_values(const Layout& l, int rows) { return float32::values(l, rows); }
};

inline KeyKernel keys(const Layout& l, int rows) { return unrolled::choose_keys<Set>(l, rows); }
inline ValueKernel values(const Layout& l, int rows) { return unrolled::choose_values<Set>(l, rows); }

}  // namespace integer
}  // namespace

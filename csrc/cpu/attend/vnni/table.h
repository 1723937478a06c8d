// The integer kernels of AVX-512 with VNNI and VBMI (see ../integer/choose.h).
#pragma once

#include "../integer/choose.h"
#include "../integer/boosted_keys.h"
#include "../integer/channel_keys.h"
#include "../integer/hybrid_keys.h"
#include "../integer/transformed_keys.h"
#include "hybrid_values.h"
#include "polar_keys.h"
#include "raw.h"
#include "sketch_keys.h"
#include "softmax.h"
#include "token_values.h"

namespace {
namespace integer {

struct Set {
  static constexpr int LANES = 16;
  template <int D, int BITS>
  using Channel = ChannelKeys<D, BITS>;
  template <int D>
  using Boosted = BoostedKeys<D>;
  template <int D>
  using Hybrid = HybridKeys2<D>;
  template <int D>
  using Sketch = SketchKeys<D>;
  template <int D, int RADIUS_BITS>
  using Polar = PolarKeys<D, RADIUS_BITS>;
  template <int PLANE>
  using Transformed = TransformedKeys<PLANE>;
  template <int BITS>
  using Token = TokenValues<BITS>;
  template <int BITS>
  using Searched = TokenValues<BITS, true>;
  using HybridValues = HybridValues2;
};

inline KeyKernel keys(const Layout& l, int rows) { return unrolled::choose_keys<Set>(l, rows); }
inline ValueKernel values(const Layout& l, int rows) { return unrolled::choose_values<Set>(l, rows); }

}  // namespace integer
}  // namespace

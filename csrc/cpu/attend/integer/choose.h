// Which integer kernel serves which layout; the float32 kernels serve the rest.
//
// `Set` names the kernels of an instruction set: Channel<D, BITS>, Boosted<D>, Hybrid<D>, Sketch, Polar<D, RADIUS_BITS>,
// JoinedPolar<D>, Transformed<PLANE>, Token<BITS>, Searched<BITS>, HybridValues; and LANES, the 32-bit lanes of its vectors.
// What it calls Elsewhere, and what has no kernel here, other_keys and other_values serve.
#pragma once

#include <type_traits>

#include "../float32/table.h"

namespace {
namespace unrolled {

using namespace kvq;

struct Elsewhere {};

template <class Set, class K>
inline KeyKernel key_kernel(const Layout& l, int rows) {
  if constexpr (std::is_same_v<K, Elsewhere>)
    return Set::other_keys(l, rows);
  else if constexpr (Set::TILES)
    return {K::work_bytes, K::begin, K::score, true, true};
  else
    return {K::work_bytes, K::begin, each_slab<K::score>, true};
}

template <class Set, class K>
inline ValueKernel value_kernel(const Layout& l, int rows) {
  if constexpr (std::is_same_v<K, Elsewhere>)
    return Set::other_values(l, rows);
  else
    return {K::work_bytes, K::add, true, Set::TILES};
}

template <int D>
struct Size {
  static constexpr int d = D;
};

// The head sizes for which PolarQuant's kernels are compiled: these unroll their loops over channels.
constexpr int MOST_UNROLLED = 256;

// f(Size<D>) for the head sizes that have kernels; by tiles, only those whose planes are whole lines of them.
template <class Set, class F>
inline KeyKernel by_head_size(const Layout& l, int rows, F&& f) {
  switch (l.d) {
#ifndef KVQ_SANITIZED
    case 64: return f(Size<64>{});
#endif
    case 128: return f(Size<128>{});
#ifndef KVQ_SANITIZED
    case 256: return f(Size<256>{});
    case 512: return f(Size<512>{});
    case 96:
      if constexpr (!Set::TILES) return f(Size<96>{});
      break;
    case 192:
      if constexpr (!Set::TILES) return f(Size<192>{});
      break;
#endif
    default: break;
  }
  return Set::other_keys(l, rows);
}

// By the slots that a plane has room for: each head has as many, whatever its size.
template <class Set>
inline KeyKernel choose_transformed(const Layout& l, int rows) {
  if (l.slots <= 4 * 64) return key_kernel<Set, typename Set::template Transformed<64>>(l, rows);
#ifndef KVQ_SANITIZED
  if (l.slots <= 4 * 128) return key_kernel<Set, typename Set::template Transformed<128>>(l, rows);
  if (l.slots <= 4 * 256) return key_kernel<Set, typename Set::template Transformed<256>>(l, rows);
#endif
  return Set::other_keys(l, rows);
}

template <class Set>
inline KeyKernel choose_keys(const Layout& l, int rows) {
  if (l.keys == Keys::transformed) return choose_transformed<Set>(l, rows);
  if (l.keys == Keys::sketch && l.sketch_rows <= MOST_SIGNS && l.outer_rows <= MOST_SIGNS && l.outliers <= 32)
    return key_kernel<Set, typename Set::Sketch>(l, rows);
  return by_head_size<Set>(l, rows, [&](auto size) -> KeyKernel {
    constexpr int D = decltype(size)::d;
    const bool channel = l.keys == Keys::channel;
    if (channel && l.key_bits == 2) return key_kernel<Set, typename Set::template Channel<D, 2>>(l, rows);
    if (channel && l.key_bits == 4) return key_kernel<Set, typename Set::template Channel<D, 4>>(l, rows);
    if (l.keys == Keys::boosted && l.boosted <= D / 2) return key_kernel<Set, typename Set::template Boosted<D>>(l, rows);
    if (l.keys == Keys::hybrid && l.key_bits == 2) return key_kernel<Set, typename Set::template Hybrid<D>>(l, rows);
    if constexpr (D <= MOST_UNROLLED) {
      if (l.keys == Keys::polar) {
        if (l.key_bits == 4 && l.radius_bits == 4) return key_kernel<Set, typename Set::template Polar<D, 4>>(l, rows);
        if (l.key_bits == 4) return key_kernel<Set, typename Set::template Polar<D, 2>>(l, rows);
        return key_kernel<Set, typename Set::template JoinedPolar<D>>(l, rows);
      }
    }
    return Set::other_keys(l, rows);
  });
}

template <class Set>
inline ValueKernel choose_values(const Layout& l, int rows) {
  const bool planes = !Set::TILES || l.d * low_value_bits(l) / 8 % Set::LANES == 0, whole_groups = l.group % 32 == 0;
  if (l.values == Values::token && planes && whole_groups) {
    if (l.value_bits == 2) return value_kernel<Set, typename Set::template Token<2>>(l, rows);
    if (l.value_bits == 4) return value_kernel<Set, typename Set::template Token<4>>(l, rows);
  }
  if (l.values == Values::searched && planes) {
    const int64_t high = l.d / 8;  // words of a plane of third bits, of which tiles take whole lines or half a line
    if (l.value_bits == 2) return value_kernel<Set, typename Set::template Searched<2>>(l, rows);
    if (l.value_bits == 3 && (!Set::TILES || high % Set::LANES == 0 || high == 8))
      return value_kernel<Set, typename Set::template Searched<3>>(l, rows);
    if (l.value_bits == 4) return value_kernel<Set, typename Set::template Searched<4>>(l, rows);
  }
  if (l.values == Values::hybrid && l.value_bits == 2 && planes) return value_kernel<Set, typename Set::HybridValues>(l, rows);
  return Set::other_values(l, rows);
}

}  // namespace unrolled
}  // namespace

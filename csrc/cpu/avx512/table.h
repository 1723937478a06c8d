// Which integer kernel serves which layout; the generic float kernels serve the rest.
#pragma once

#include "../generic/table.h"
#include "channel_keys.h"
#include "hybrid_keys.h"
#include "hybrid_values.h"
#include "polar_keys.h"
#include "sketch_keys.h"
#include "softmax.h"
#include "token_values.h"

namespace {
namespace avx512 {

template <class K>
constexpr KeyKernel key_kernel() {
  return {K::work_bytes, K::begin, K::score};
}

// `Kernel<D>` for the head sizes whose planes are whole vectors.
template <template <int> class Kernel>
inline KeyKernel by_head_size(const Layout& l, int rows) {
  switch (l.d) {
#ifndef KVQ_SANITIZED
    case 64: return key_kernel<Kernel<64>>();
#endif
    case 128: return key_kernel<Kernel<128>>();
#ifndef KVQ_SANITIZED
    case 256: return key_kernel<Kernel<256>>();
#endif
    default: return generic::keys(l, rows);
  }
}

template <int D>
using ChannelKeys2 = ChannelKeys<D, 2>;
template <int D>
using ChannelKeys4 = ChannelKeys<D, 4>;
template <int D>
using PolarKeys4 = PolarKeys<D, 4>;
template <int D>
using PolarKeys2 = PolarKeys<D, 2>;

inline KeyKernel keys(const Layout& l, int rows) {
  if (l.keys == Keys::channel && l.key_bits == 2) return by_head_size<ChannelKeys2>(l, rows);
  if (l.keys == Keys::channel && l.key_bits == 4) return by_head_size<ChannelKeys4>(l, rows);
  if (l.keys == Keys::hybrid && l.key_bits == 2) return by_head_size<HybridKeys2>(l, rows);
  if (l.keys == Keys::sketch && l.sketch_rows == 2 * l.d && l.outer_rows == l.d && l.outliers <= 32)
    return by_head_size<SketchKeys>(l, rows);
  if (l.keys == Keys::polar && !l.paper && l.key_bits == 4 && l.radius_bits == 4)
    return by_head_size<PolarKeys4>(l, rows);
  if (l.keys == Keys::polar && !l.paper && l.key_bits == 4 && l.radius_bits == 2)
    return by_head_size<PolarKeys2>(l, rows);
  return generic::keys(l, rows);
}

inline ValueKernel values(const Layout& l, int rows) {
  const bool whole_planes = l.d * l.value_bits / 8 % 16 == 0, whole_groups = l.group % 32 == 0;
  if (l.values == Values::token && whole_planes && whole_groups) {
    if (l.value_bits == 2) return {TokenValues<2>::work_bytes, TokenValues<2>::add};
    if (l.value_bits == 4) return {TokenValues<4>::work_bytes, TokenValues<4>::add};
  }
  if (l.values == Values::hybrid && l.value_bits == 2 && whole_planes)
    return {HybridValues2::work_bytes, HybridValues2::add};
  return generic::values(l, rows);
}

}  // namespace avx512
}  // namespace

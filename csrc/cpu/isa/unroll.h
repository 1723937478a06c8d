// Loops of the integer kernels whose arrays must stay in registers.
#pragma once

#include <type_traits>
#include <utility>

#define KVQ_INLINE inline __attribute__((always_inline))
#define KVQ_LAMBDA __attribute__((always_inline))

namespace {
namespace unrolled {

// Calls f(std::integral_constant<int, i>) for i in [0, N): loops whose arrays must stay in registers.
template <int N, class F, int... I>
KVQ_INLINE void unroll_over(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
KVQ_INLINE void unroll(F&& f) {
  unroll_over<N>(f, std::make_integer_sequence<int, N>{});
}

// Calls f(std::integral_constant<int, R>, first row) for tiles of up to 4 rows.
template <class F>
KVQ_INLINE void row_tiles(int rows, F&& f) {
  int r = 0;
  for (; rows >= 4; rows -= 4, r += 4) f(std::integral_constant<int, 4>{}, r);
  if (rows == 0) return;
  switch (rows) {
    case 3: f(std::integral_constant<int, 3>{}, r); break;
    case 2: f(std::integral_constant<int, 2>{}, r); break;
    case 1: f(std::integral_constant<int, 1>{}, r); break;
    default: break;
  }
}

// Calls f(channels of a plane of BITS-bit codes): a constant, so that addresses are constants, too, except for heads of
// 512 channels.
template <int BITS, class F>
KVQ_INLINE void by_stride(int64_t d, F&& f) {
  switch (d) {
    case 64: f(std::integral_constant<int64_t, 64 * BITS / 8>{}); break;
    case 96: f(std::integral_constant<int64_t, 96 * BITS / 8>{}); break;
    case 128: f(std::integral_constant<int64_t, 128 * BITS / 8>{}); break;
    case 192: f(std::integral_constant<int64_t, 192 * BITS / 8>{}); break;
    case 256: f(std::integral_constant<int64_t, 256 * BITS / 8>{}); break;
    default: f(d * BITS / 8);
  }
}

// Half as many channels: a constant of a constant.
KVQ_INLINE int64_t half_of(int64_t stride) { return stride / 2; }
template <int64_t STRIDE>
KVQ_INLINE std::integral_constant<int64_t, STRIDE / 2> half_of(std::integral_constant<int64_t, STRIDE>) {
  return {};
}

}  // namespace unrolled
}  // namespace

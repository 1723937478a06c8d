// What PolarQuant's kernels for every instruction set ask of a page: 16 angles in equal steps, whatever the grid, and
// codes that fill a nibble, whatever their bits.
//
// Angles of m < 4 bits are every 2^(4 - m)-th of 16: their codes become the high bits of a nibble.
#pragma once

#include <cstring>

#include "../../dispatch/attend_kernels.h"
#include "../../isa/lanes.h"

namespace {
namespace integer {

using namespace kvq;

// What a kernel asks of a grid of 16 angles: where a code lies, perhaps between two angles, and how long some steps are.
struct PolarGrid {
  static constexpr float SIXTEENTH = 6.28318531f / 16;
  float code, steps;
  float before, part;  // the same in the page's own steps, from the edge of its first cell
  float last;          // code of a radius

  PolarGrid(const Layout& l, float code, float steps)
      : code(code),
        steps(steps),
        before(code * float(1 << l.key_bits) / 16 + 0.5f),
        part(steps * float(1 << l.key_bits) / 16),
        last(float((1 << l.radius_bits) - 1)) {}
};

// The answer for as many pairs as V has lanes: the code's angle and that of the steps; the first radius, the last one and
// their step. `load` reads a field of the page.
template <class V>
struct PolarCells {
  V angle, turn, first, last, step;

  template <class Load>
  KVQ_INLINE PolarCells(const Layout& l, const PolarGrid& grid, Load load)
      : angle(V{} + grid.code * PolarGrid::SIXTEENTH), turn(V{} + grid.steps * PolarGrid::SIXTEENTH), first{} {
    step = load(l.k_radius_step);
    if (!l.paper) {
      const V own = load(l.k_angle_step);
      angle = own * grid.before + load(l.k_angle0);
      turn = own * grid.part;
      first = step * 0.5f + load(l.k_radius0);
    }
    last = step * grid.last + first;
  }
};

// Codes of `bits` as key_code_shape(pairs, bits) lays them out (formats/parts/planes.py), shifted up and added to the
// bytes of PAIRS pairs, [PAIRS / 4][32][4].
template <int PAIRS>
inline void add_codes(const uint8_t* codes, int pairs, int bits, int up, uint8_t* bytes) {
  const int stride = pairs * bits / 32;  // quads of a plane
  const Ints mask = L::all8((1 << bits) - 1);
  for (int quad = 0; quad < PAIRS / 4; ++quad)
    for (int i = 0; i < 128; i += int(sizeof(Ints))) {
      const Ints field = L::load_bytes(codes + quad % stride * 128 + i) >> (quad / stride * bits);
      uint8_t* to = bytes + quad * 128 + i;
      store_bytes(to, L::load_bytes(to) | (field & mask) << up);
    }
}

// A slab's codes, whatever their bits, as bytes with the angle in the low and the radius in the high nibble.
template <int PAIRS>
static __attribute__((noinline)) void join_codes(const Layout& l, const Slab& slab, uint8_t (&bytes)[PAIRS * SLAB]) {
  const int bits = int(l.key_bits);
  std::memset(bytes, 0, sizeof bytes);
  add_codes<PAIRS>(slab.data + l.k_angle, PAIRS, bits == 3 ? 2 : bits, 4 - bits, bytes);
  if (bits == 3) add_codes<PAIRS>(slab.data + l.k_angle_high, (PAIRS + 31) / 32 * 32, 1, 3, bytes);
  add_codes<PAIRS>(slab.data + l.k_radius, PAIRS, int(l.radius_bits), 4, bytes);
}

// The kernel of 4-bit codes for others, which it joins to nibbles first.
template <class Keys>
struct JoinedPolarKeys : Keys {
  static void score(Task& task, const Slab& slab, int column) { Keys::template score_codes<true>(task, slab, column); }
};

}  // namespace integer
}  // namespace

// Which channels of a slab of Kitty's keys (formats/methods/kitty.py) have 4 bits. The unnamed namespace: see half.h.
#pragma once

#include <cstdint>

namespace {

// The `boosted` channels whose scale, a float16, has its sign bit set, in their order. `channels` has room for d.
inline void boosted_channels(const uint8_t* scale, int d, int boosted, int32_t* channels) {
  int count = 0;
  for (int c = 0; c < d; ++c) {
    channels[count] = c;  // stays if it is boosted
    count += scale[2 * c + 1] >> 7;
  }
  for (; count < boosted; ++count) channels[count] = 0;  // fewer only in bytes that were never packed
}

}  // namespace

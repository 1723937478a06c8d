// The compiler's intrinsics and, next to them, what keeps g++ from moving sums.
// KVQ_EMULATED_AVX512: AVX-512 for processors that have none, and VNNI, VBMI and bf16 with it (docs/cpu.md).
#pragma once

#include "unroll.h"
#ifdef KVQ_EMULATED_AVX512
#include "emulated.h"
#else
#include <immintrin.h>
#endif

namespace {

// x is what the program has just computed, in a register.
template <class Vector>
KVQ_INLINE void in_register(Vector& x) {
#ifdef KVQ_EMULATED_AVX512
  (void)x;
#else
  asm("" : "+v"(x));
#endif
}

}  // namespace

// Kernels for AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later): integer dot products where the layout allows,
// float32 elsewhere.
// KVQ_WITHOUT_AVX512: the portable kernels take their place in a build that is only tested with what comes in addition.
#if defined(__x86_64__)
#include "../dispatch/isa.h"
#ifdef KVQ_WITHOUT_AVX512
const kvq::Isa kvq::avx512_isa = {"avx512", kvq::portable_isa.attend, kvq::portable_isa.pack};
#else
#define KVQ_LANES 16
#define KVQ_VNNI
#include "../attend/vnni/table.h"
#include "../pack/table.h"

namespace kvq {
// vpdpbusd multiplies twice as many bytes as an FMA multiplies floats, queries' two bytes counted: no `many` here, but
// see amx.cpp
// clang-format off
const Isa avx512_isa = {"avx512",
                        {integer::keys, integer::values, float32::cap, integer::softmax, integer::add_raw, float32::project,
                         {float32::never, float32::many_bytes, float32::begin_many, float32::many, true}},
                        float32::pack_kernels};
// clang-format on
}
#endif
#endif

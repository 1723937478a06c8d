// Kernels for AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later): integer dot products where the layout allows,
// float32 elsewhere.
#if defined(__x86_64__)
#define KVQ_LANES 16
#define KVQ_VNNI
#include "../attend/vnni/table.h"
#include "../pack/table.h"
#include "../dispatch/isa.h"

namespace kvq {
// vpdpbusd multiplies twice as many bytes as an FMA multiplies floats, queries' two bytes counted: no `many` here
// clang-format off
const Isa avx512_isa = {"avx512",
                        {integer::keys, integer::values, float32::cap, integer::softmax, integer::add_raw, float32::project,
                         {float32::never, float32::many_bytes, float32::many}},
                        float32::pack_kernels};
// clang-format on
}
#endif

// Kernels for AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later): integer dot products where the layout allows,
// generic vector code elsewhere.
#if defined(__x86_64__)
#define KVQ_LANES 16
#include "avx512/table.h"

namespace kvq {
// vpdpbusd multiplies twice as many bytes as an FMA multiplies floats, queries' two bytes counted: no `many` here
const Isa avx512_isa = {"avx512", avx512::keys, avx512::values, avx512::softmax, avx512::add_raw,
                        generic::project, {generic::never, generic::many_bytes, generic::many}};
}
#endif

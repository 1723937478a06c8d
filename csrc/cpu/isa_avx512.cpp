// Kernels for AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later): integer dot products where the layout allows,
// generic vector code elsewhere.
#if defined(__x86_64__)
#define KVQ_LANES 16
#include "generic/table.h"

namespace kvq {
const Isa avx512_isa = {"avx512", generic::keys, generic::values, generic::softmax, generic::project};
}
#endif

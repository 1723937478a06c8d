// Kernels for AVX2 with FMA and F16C: integer products where the layout allows, generic vector code elsewhere.
// Compiled with those flags; only called after cpu.h has seen them on the processor.
#if defined(__x86_64__)
#define KVQ_LANES 8
#include "avx/table.h"

namespace kvq {
const Isa avx2_isa = {"avx2", avx::keys, avx::values, generic::softmax, generic::add_raw, generic::project,
                      generic::many_kernel};
}
#endif

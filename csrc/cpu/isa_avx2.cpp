// Kernels for AVX2 with FMA. Compiled with those flags; only called after cpu.h has seen them on the processor.
#if defined(__x86_64__)
#define KVQ_LANES 8
#include "generic/table.h"

namespace kvq {
const Isa avx2_isa = {"avx2", generic::keys, generic::values, generic::softmax, generic::add_raw,
                          generic::project};
}
#endif

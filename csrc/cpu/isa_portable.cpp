// Kernels for any processor (the compiler's baseline: SSE2 on x86-64, NEON on aarch64).
#define KVQ_LANES 4
#include "generic/table.h"

namespace kvq {
const Isa portable_isa = {"portable", generic::keys, generic::values, generic::softmax, generic::add_raw,
                          generic::project,
                          generic::many_kernel};
}

// Kernels for any processor: the compiler's baseline, which is SSE2 on x86-64 and NEON on aarch64.
#define KVQ_LANES 4
#include "../attend/float32/table.h"
#include "../pack/table.h"
#include "../dispatch/isa.h"

namespace kvq {
const Isa portable_isa = {"portable",
                          {float32::keys, float32::values, float32::cap, float32::softmax, float32::add_raw, float32::project,
                           float32::many_kernel},
                          float32::pack_kernels};
}

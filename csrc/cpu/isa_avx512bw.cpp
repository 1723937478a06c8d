// Kernels for AVX-512 without VNNI or VBMI (Skylake and Cascade Lake servers): those of AVX2 with wider vectors.
#if defined(__x86_64__)
#define KVQ_LANES 16
#include "avx/table.h"

namespace kvq {
const Isa avx512bw_isa = {"avx512bw", avx::keys, avx::values, generic::softmax, generic::add_raw, generic::project,
                          generic::many_kernel};
}
#endif

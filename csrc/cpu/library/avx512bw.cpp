// Kernels for AVX-512 without VNNI or VBMI (Skylake and Cascade Lake servers): those of AVX2 with wider vectors.
#if defined(__x86_64__)
#define KVQ_LANES 16
#include "../attend/avx2/table.h"
#include "../pack/table.h"
#include "../dispatch/isa.h"

namespace kvq {
const Isa avx512bw_isa = {"avx512bw",
                          {integer::keys, integer::values, float32::cap, float32::softmax, float32::add_raw, float32::project,
                           float32::many_kernel},
                          float32::pack_kernels};
}
#endif

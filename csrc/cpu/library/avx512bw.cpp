// Kernels for AVX-512 without VNNI or VBMI (Skylake and Cascade Lake servers): those of AVX2 with wider vectors.
// KVQ_WITHOUT_AVX512BW: as in avx2.cpp.
#if defined(__x86_64__)
#include "../dispatch/isa.h"
#ifdef KVQ_WITHOUT_AVX512BW
const kvq::Isa kvq::avx512bw_isa = {"avx512bw", {}, {}};
#else
#define KVQ_LANES 16
#include "../attend/avx2/table.h"
#include "../pack/table.h"

namespace kvq {
const Isa avx512bw_isa = {"avx512bw",
                          {integer::keys, integer::values, float32::cap, float32::softmax, float32::add_raw, float32::project,
                           float32::many_kernel},
                          float32::pack_kernels};
}
#endif
#endif

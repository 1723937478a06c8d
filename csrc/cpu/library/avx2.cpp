// Kernels for AVX2 with FMA and F16C: integer products where the layout allows, float32 elsewhere.
// Compiled with those flags; only called where dispatch/isa.h has seen them on the processor.
// KVQ_WITHOUT_AVX2: left out of a build that is only tested with other instruction sets.
#if defined(__x86_64__)
#include "../dispatch/isa.h"
#ifdef KVQ_WITHOUT_AVX2
const kvq::Isa kvq::avx2_isa = {"avx2", {}, {}};
#else
#define KVQ_LANES 8
#include "../attend/avx2/table.h"
#include "../pack/table.h"

namespace kvq {
const Isa avx2_isa = {"avx2",
                      {integer::keys, integer::values, float32::cap, float32::softmax, float32::add_raw, float32::project,
                       float32::many_kernel},
                      float32::pack_kernels};
}
#endif
#endif

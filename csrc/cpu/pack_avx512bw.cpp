// Packing compiled for AVX-512 without VNNI or VBMI.
#if defined(__x86_64__)
#define KVQ_LANES 16
#include "generic/pack.h"

namespace kvq {
const PackIsa avx512bw_pack = {generic::read_tokens, generic::pack_work_bytes, generic::pack_unit,
                          generic::gram,        generic::squares,         generic::largest_of};
}
#endif

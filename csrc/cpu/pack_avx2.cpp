// Packing compiled for AVX2 with FMA.
#if defined(__x86_64__)
#define KVQ_LANES 8
#include "generic/pack.h"

namespace kvq {
const PackIsa avx2_pack = {generic::read_tokens, generic::pack_work_bytes, generic::pack_unit,
                          generic::gram,        generic::squares,         generic::largest_of};
}
#endif

// Packing for any processor.
#define KVQ_LANES 4
#include "generic/pack.h"

namespace kvq {
const PackIsa portable_pack = {generic::read_tokens, generic::pack_work_bytes, generic::pack_unit,
                          generic::gram,        generic::squares,         generic::largest_of};
}

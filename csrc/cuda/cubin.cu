// A single kernel, for one architecture, read by proof.tables.compile_table. KVQ_PART selects it, KVQ_D its head size.
#if KVQ_PART <= 2
#include "attend.h"
template __global__ void kvq::attend_kernel<KVQ_D, KVQ_PART>(kvq::AttendParams);
#elif KVQ_PART <= 4
#include "query.h"
template __global__ void kvq::query_kernel<KVQ_D, KVQ_PART - 2>(kvq::QueryParams);
#else
#include "pack.h"
template __global__ void kvq::pack_kernel<KVQ_D>(kvq::PackParams);
#endif

// What the kernels need of a GPU, each as one small function; emulate.h has the same functions for a CPU.
#pragma once

#if defined(KVQ_EMULATE)
#include "emulate.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

#define KVQ_DEV __device__ __forceinline__
#define KVQ_UNROLL _Pragma("unroll")
#define KVQ_ROLLED _Pragma("unroll 1")
#define KVQ_GLOBAL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)

namespace kvq {

using Quad = uint4;
using Pair = uint2;
using Float4 = float4;

KVQ_DEV int lane() { return threadIdx.x & 31; }
KVQ_DEV int warp_index() { return threadIdx.x >> 5; }
KVQ_DEV int thread_index() { return threadIdx.x; }
KVQ_DEV int block_x() { return blockIdx.x; }
KVQ_DEV int block_y() { return blockIdx.y; }
KVQ_DEV char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

template <class T>
KVQ_DEV T load(const T* p) {
  return *p;
}
template <class T>
KVQ_DEV void store(T* p, T x) {
  *p = x;
}
template <class T>
KVQ_DEV T from_shared(const void* p) {
  return *static_cast<const T*>(p);
}
template <class T>
KVQ_DEV void to_shared(void* p, T x) {
  *static_cast<T*>(p) = x;
}
KVQ_DEV void add_atomically(int32_t* p, int32_t x) { atomicAdd(p, x); }

// 16 bytes, past L1: a slab is read once
KVQ_DEV void copy_async(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
KVQ_DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
KVQ_DEV void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

KVQ_DEV void sync_warp() { __syncwarp(); }
KVQ_DEV void sync_block() { __syncthreads(); }

// c (16 x 8, float32) += a (16 x 16) b (16 x 8), float16
KVQ_DEV void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

KVQ_DEV float shuffle(float x, int from) { return __shfl_sync(0xFFFFFFFFu, x, from); }
KVQ_DEV float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
KVQ_DEV bool any(bool x) { return __any_sync(0xFFFFFFFFu, x); }

// an 8 x 8 matrix of 16-bit numbers, two of a row per lane
KVQ_DEV uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

KVQ_DEV float half_to_float(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
KVQ_DEV uint16_t float_to_half(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
KVQ_DEV uint32_t pack_halves(float low, float high) {
  uint32_t x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
KVQ_DEV uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t x;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
// 0x5410: the low halves of a and b; 0x7632: the high ones
template <uint32_t SELECT>
KVQ_DEV uint32_t permute(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, SELECT);
}
KVQ_DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVQ_DEV float log2_of(float x) { return log2f(x); }
KVQ_DEV float larger(float a, float b) { return fmaxf(a, b); }
KVQ_DEV float fused(float a, float b, float c) { return fmaf(a, b, c); }
KVQ_DEV float divide(float a, float b) { return __fdiv_rn(a, b); }
KVQ_DEV float square_root(float x) { return __fsqrt_rn(x); }
KVQ_DEV float nearest(float x) { return rintf(x); }
KVQ_DEV float bits_to_float(uint32_t x) { return __uint_as_float(x); }
KVQ_DEV uint32_t high_product(uint32_t a, uint32_t b) { return __umulhi(a, b); }

}  // namespace kvq
#endif

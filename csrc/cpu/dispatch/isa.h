// The instruction sets for which the library is compiled, and which of them this processor has.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "attend_kernels.h"
#include "pack_kernels.h"

namespace kvq {

#if defined(__x86_64__)
// clang 14's builtin does not know the name
inline bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// 0 portable, 1 AVX2 with FMA and F16C, 2 AVX-512 with BW, 3 also with VNNI and VBMI. The compiler's builtin also asks
// whether the operating system saves the registers.
inline int find_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2") || !has_f16c())
    return 0;
#ifdef KVQ_EMULATED_AVX512
  return 3;
#endif
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return 1;
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") ? 3 : 2;
#else
  return 0;
#endif
}

// Products of bf16 numbers, which come in addition to level 3 (Zen 4, Cooper Lake and Sapphire Rapids have them, Ice Lake doesn't).
inline bool has_bf16() {
#if defined(__x86_64__)
#ifdef KVQ_EMULATED_AVX512
  return true;
#endif
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

// Queried once: every call of the library checks its argument, and CPUID takes microseconds in virtual machines.
inline int best_isa() {
  static const int best = find_best_isa();
  return best;
}

// One translation unit of library/.
struct Isa {
  const char* name;
  AttendKernels attend;
  PackKernels pack;
};

extern const Isa portable_isa;
#if defined(__x86_64__)
extern const Isa avx2_isa, avx512bw_isa, avx512_isa;

// Products of tiles (library/amx.cpp): of bf16 numbers, in addition to has_bf16, and of bytes. The first call asks Linux
// for them.
bool has_amx_bf16();
bool has_amx_bytes();
extern const ManyKernel amx_many;
extern const TileKernels amx_few;
#endif

#if defined(__x86_64__)
constexpr int ISAS = 4;
#else
constexpr int ISAS = 1;
#endif

inline const Isa& isa(int level) {
#if defined(__x86_64__)
  if (level == 3) return avx512_isa;
  if (level == 2) return avx512bw_isa;
  if (level == 1) return avx2_isa;
#endif
  (void)level;
  return portable_isa;
}

inline bool has_tiles(int level) {
#if defined(__x86_64__)
  return level == 3 && has_bf16() && has_amx_bf16();
#else
  (void)level;
  return false;
#endif
}

inline bool has_byte_tiles(int level) {
#if defined(__x86_64__)
  return level == 3 && has_amx_bytes();
#else
  (void)level;
  return false;
#endif
}

inline KeyKernel key_kernel(int level, const Layout& l, int rows) {
#if defined(__x86_64__)
  if (has_byte_tiles(level)) return amx_few.keys(l, rows);
#endif
  return isa(level).attend.keys(l, rows);
}

inline ValueKernel value_kernel(int level, const Layout& l, int rows) {
#if defined(__x86_64__)
  if (has_byte_tiles(level)) return amx_few.values(l, rows);
#endif
  return isa(level).attend.values(l, rows);
}

// Around the blocks of a task whose kernels say `tiles`.
inline void begin_tiles(const Layout& l, int rows) {
#if defined(__x86_64__)
  amx_few.begin(l, rows);
#endif
  (void)l;
  (void)rows;
}
inline void end_tiles() {
#if defined(__x86_64__)
  amx_few.end();
#endif
}

// For queries of this type: tiles take bf16 numbers only.
inline const ManyKernel& many_kernel(int level, Dtype query) {
#if defined(__x86_64__)
  if (query == Dtype::bf16 && has_tiles(level)) return amx_many;
#endif
  (void)query;
  return isa(level).attend.many;
}

}  // namespace kvq

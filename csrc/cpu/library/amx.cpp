// Kernels for AMX (Sapphire Rapids and later), in addition to those of avx512.cpp: products of bytes for the rows of a
// decode step and its drafts, and of bf16 numbers for many rows, as in a prompt's chunk.
// KVQ_WITHOUT_AMX: left out, to compare; KVQ_EMULATED_TILES: see isa/tiles.h.
#if defined(__x86_64__)
#include "../dispatch/isa.h"
#ifdef KVQ_WITHOUT_AMX
namespace kvq {
bool has_amx_bf16() { return false; }
bool has_amx_bytes() { return false; }
const ManyKernel amx_many = {};
const TileKernels amx_few = {};
}
#else
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define KVQ_LANES 16
#define KVQ_VNNI
#include "../attend/amx/many.h"
#include "../attend/amx/table.h"

namespace kvq {
namespace {

constexpr unsigned TILES = 1u << 24, BYTES = 1u << 25, BF16 = 1u << 22;  // CPUID, leaf 7, EDX

// What the processor has if the system saves its registers and Linux gives them to this process: a process that did not
// ask is killed at its first instruction.
unsigned ask_for_amx() {
#if defined(KVQ_EMULATED_TILES)
  return BYTES | BF16;
#elif defined(__linux__)
  constexpr unsigned STATE = 3u << 17, DATA = 18;
  constexpr long REQUEST = 0x1023;  // ARCH_REQ_XCOMP_PERM
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & TILES)) return 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & STATE) == STATE && syscall(SYS_arch_prctl, REQUEST, DATA) == 0 ? d : 0;
#else
  return 0;
#endif
}

bool has(unsigned feature) {
  static const unsigned found = ask_for_amx();
  return found & feature;
}

// Not measured: with fewer rows, unpacking for all of them is expected to cost more than VNNI.
int64_t many_rows(const Layout& l) { return l.keys == Keys::sketch ? 192 : 64; }

}  // namespace

bool has_amx_bf16() { return has(BF16); }
bool has_amx_bytes() { return has(BYTES); }

const ManyKernel amx_many = {many_rows, amx::Work::bytes, amx::begin, amx::many, false};
const TileKernels amx_few = amx::few;
}  // namespace kvq
#endif
#endif

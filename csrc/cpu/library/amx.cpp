// Kernels for AMX with bf16 (Sapphire Rapids and later), in addition to those of avx512.cpp: many rows, as in a prompt's
// chunk. Fewer rows are left to VNNI.
// KVQ_WITHOUT_AMX: left out, to compare; KVQ_EMULATED_TILES: see isa/tiles.h.
#if defined(__x86_64__)
#include "../dispatch/isa.h"
#ifdef KVQ_WITHOUT_AMX
namespace kvq {
bool has_amx() { return false; }
const ManyKernel amx_many = {};
}
#else
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define KVQ_LANES 16
#include "../attend/amx/many.h"

namespace kvq {
namespace {

// The processor has it, the system saves its registers, and Linux gives it to this process: a process that did not ask
// is killed at its first instruction.
bool ask_for_amx() {
#if defined(KVQ_EMULATED_TILES)
  return true;
#elif defined(__linux__)
  constexpr unsigned TILES = 1u << 24, BF16 = 1u << 22, STATE = 3u << 17, DATA = 18;
  constexpr long REQUEST = 0x1023;  // ARCH_REQ_XCOMP_PERM
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILES | BF16)) != (TILES | BF16)) return false;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & STATE) == STATE && syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
#else
  return false;
#endif
}

// Not measured: with fewer rows, unpacking for all of them is expected to cost more than VNNI.
int64_t many_rows(const Layout& l) { return l.keys == Keys::sketch ? 192 : 64; }

}  // namespace

bool has_amx() {
  static const bool has = ask_for_amx();
  return has;
}

const ManyKernel amx_many = {many_rows, amx::Work::bytes, amx::begin, amx::many, false};
}  // namespace kvq
#endif
#endif

// Watches a thread of its own process: counts the instructions that it executes in one library, and stands in for a
// processor with AVX-512 VNNI and VBMI on one that has AVX-512 without them. x86-64 Linux; a tool for tests and
// benchmarks, about 3 us per instruction.
//
//   counting     the trap flag: a SIGTRAP after each instruction
//   VNNI, VBMI   SIGILL: the instruction is done on the registers in the signal's frame (evex.h)
//   CPUID        made to fault (arch_prctl) and answered with two more bits, for whatever queries it meanwhile
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "evex.h"

namespace {

using namespace probe;

constexpr int ARCH_CPUID = 0x1012;

struct Watch {
  uintptr_t low, high;
  uint64_t inside;
};
thread_local Watch watch;

// An instruction counts when the thread arrives at it.
inline void arrive(const uint8_t* rip) {
  const auto at = reinterpret_cast<uintptr_t>(rip);
  watch.inside += at >= watch.low && at < watch.high;
}

void on_trap(int, siginfo_t*, void* context) { arrive(Frame(context).rip()); }

void on_illegal(int number, siginfo_t*, void* context) {
  Frame frame(context);
  if (!Evex(frame).execute())
    signal(number, SIG_DFL);  // recurs immediately, and kills the process
  else if (watch.high)
    arrive(frame.rip());  // no trap follows
}

bool fault_on_cpuid(bool on) { return syscall(SYS_arch_prctl, ARCH_CPUID, on ? 0 : 1) == 0; }

void on_fault(int number, siginfo_t*, void* context) {
  Frame frame(context);
  const uint8_t* p = frame.rip();
  if (p[0] != 0x0F || p[1] != 0xA2) {
    signal(number, SIG_DFL);
    return;
  }
  const auto leaf = unsigned(frame.general(0)), sub = unsigned(frame.general(1));
  unsigned a, b, c, d;
  fault_on_cpuid(false);
  __cpuid_count(leaf, sub, a, b, c, d);
  fault_on_cpuid(true);
  if (leaf == 7 && sub == 0) c |= bit_AVX512VNNI | bit_AVX512VBMI;
  frame.general(0) = a;
  frame.general(3) = b;
  frame.general(1) = c;
  frame.general(2) = d;
  frame.go_to(p + 2);
}

struct sigaction handle(int number, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action = {}, old = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(number, &action, &old);
  return old;
}

struct sigaction before;

template <int FLAG>
inline void set_trap_flag() {
  // the 128 bytes below the stack pointer belong to the compiler
  asm volatile(
      "lea -128(%%rsp), %%rsp\n pushfq\n andq $~0x100, (%%rsp)\n orq %0, (%%rsp)\n popfq\n lea 128(%%rsp), %%rsp" ::"i"(FLAG)
      : "memory", "cc");
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Counts the calling thread's instructions in [low, high) from here on.
EXPORT void probe_count(uintptr_t low, uintptr_t high) {
  handle(SIGTRAP, on_trap);
  watch = {low, high, 0};
  set_trap_flag<0x100>();
}

EXPORT uint64_t probe_counted() {
  set_trap_flag<0>();
  watch.high = 0;
  return watch.inside;
}

// From here on CPUID reports VNNI and VBMI to this thread, and the process executes them. False: this processor has no
// AVX-512, or CPUID can't be made to fault here.
EXPORT int probe_pretend() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return 0;
  handle(SIGILL, on_illegal);
  before = handle(SIGSEGV, on_fault);
  if (fault_on_cpuid(true)) return 1;
  sigaction(SIGSEGV, &before, nullptr);
  return 0;
}

// CPUID answers as the processor does again; the instructions are still executed.
EXPORT void probe_stop_pretending() {
  fault_on_cpuid(false);
  sigaction(SIGSEGV, &before, nullptr);
}

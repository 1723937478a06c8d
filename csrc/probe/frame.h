// The interrupted thread's registers, as the kernel lays them out in a signal's frame (x86-64 Linux, XSAVE format).
#pragma once

#include <cpuid.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>

namespace probe {

// A vector register as a whole.
struct alignas(64) Vector {
  uint8_t of[64];
};

class Frame {
 public:
  explicit Frame(void* context) : u_(static_cast<ucontext_t*>(context)) {
    fp_ = reinterpret_cast<uint8_t*>(u_->uc_mcontext.fpregs);
  }

  const uint8_t* rip() const { return reinterpret_cast<const uint8_t*>(u_->uc_mcontext.gregs[REG_RIP]); }
  void go_to(const uint8_t* p) { u_->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(p); }

  // 0 rax, 1 rcx, 2 rdx, 3 rbx, 4 rsp, ...: as instructions number them.
  greg_t& general(int number) {
    // clang-format off
    static constexpr int PLACE[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                      REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    // clang-format on
    return u_->uc_mcontext.gregs[PLACE[number]];
  }

  Vector vector(int number) const {
    Vector v;
    for_each_part(number, [&](int component, uint8_t* place, int at, int size) {
      if (saved(component))
        std::memcpy(v.of + at, place, size);
      else
        std::memset(v.of + at, 0, size);
    });
    return v;
  }

  void set_vector(int number, const Vector& v) {
    for_each_part(number, [&](int component, uint8_t* place, int at, int size) {
      save(component);
      std::memcpy(place, v.of + at, size);
    });
  }

  uint64_t mask(int number) const {
    uint64_t bits = 0;
    if (saved(OPMASK)) std::memcpy(&bits, fp_ + offset(OPMASK) + 8 * number, 8);
    return bits;
  }

 private:
  enum Component {
    SSE = 1,
    AVX = 2,
    OPMASK = 5,
    UPPER = 6,
    HIGH = 7,
  };

  static int offset(int component) {
    if (component == SSE) return 160;
    unsigned size, at, c, d;
    __cpuid_count(0xD, component, size, at, c, d);
    return int(at);
  }
  static int length(int component) {
    if (component == SSE) return 256;
    unsigned size, at, c, d;
    __cpuid_count(0xD, component, size, at, c, d);
    return int(size);
  }

  // Registers 0 to 15 lie in three pieces, 16 to 31 in one.
  template <class F>
  void for_each_part(int number, F&& f) const {
    static const int avx = offset(AVX), upper = offset(UPPER), high = offset(HIGH);
    if (number < 16) {
      f(SSE, fp_ + 160 + 16 * number, 0, 16);
      f(AVX, fp_ + avx + 16 * number, 16, 16);
      f(UPPER, fp_ + upper + 32 * number, 32, 32);
    } else {
      f(HIGH, fp_ + high + 64 * (number - 16), 0, 64);
    }
  }

  // Registers that a thread has never used are not in the frame and count as zero.
  uint64_t header() const {
    uint64_t bits;
    std::memcpy(&bits, fp_ + 512, 8);
    return bits;
  }
  bool saved(int component) const { return header() >> component & 1; }
  void save(int component) {
    if (saved(component)) return;
    std::memset(fp_ + offset(component), 0, length(component));
    const uint64_t bits = header() | uint64_t(1) << component;
    std::memcpy(fp_ + 512, &bits, 8);
  }

  ucontext_t* u_;
  uint8_t* fp_;
};

}  // namespace probe

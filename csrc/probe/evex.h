// Executes the five instructions of AVX-512 VNNI and VBMI in the compiled csrc/cpu.
//
//     vpdpbusd   d[i] += sum of 4 products, unsigned bytes of the first source times signed bytes of the second
//     vpdpwssd   d[i] += sum of 2 products of signed 16-bit integers
//     vpermb     d[i] = second[first[i]]
//     vpermi2b   d[i] = (first ++ second)[d[i]]
//     vpermt2b   d[i] = (d ++ second)[first[i]]
//
// The first source is the prefix's register, the second the one that may be memory.
#pragma once

#include "frame.h"

namespace probe {

enum class Op {
  vpdpbusd,
  vpdpwssd,
  vpermb,
  vpermi2b,
  vpermt2b,
};

// An EVEX instruction: 62 P0 P1 P2 opcode modrm [sib] [displacement]
class Evex {
 public:
  explicit Evex(Frame& frame) : frame_(frame), p_(frame.rip()) {}

  // false: it is not one of the five, and nothing has changed
  bool execute() {
    // 0F38 map, prefix 66, W0
    if (p_[0] != 0x62 || (p_[1] & 7) != 2 || (p_[2] & 0x83) != 1) return false;
    Op op;
    switch (p_[4]) {
      case 0x50: op = Op::vpdpbusd; break;
      case 0x52: op = Op::vpdpwssd; break;
      case 0x8D: op = Op::vpermb; break;
      case 0x75: op = Op::vpermi2b; break;
      case 0x7D: op = Op::vpermt2b; break;
      default: return false;
    }
    const bool words = op == Op::vpdpbusd || op == Op::vpdpwssd, flag = p_[3] & 0x10;
    const int length = 16 << (p_[3] >> 5 & 3), modrm = p_[5], step = words ? 4 : 1;
    const bool memory = modrm >> 6 != 3;
    if (length > 64 || (flag && !(memory && words))) return false;
    const int target = (modrm >> 3 & 7) | off(1, 7) << 3 | off(1, 4) << 4;
    const int first = (~p_[2] >> 3 & 15) | off(3, 3) << 4;
    Vector second{};
    const uint8_t* next = p_ + 6;
    if (memory) {
      const uint8_t* at = address(next, flag ? 4 : length);
      for (int i = 0; i < length; i += flag ? 4 : length) std::memcpy(second.of + i, at, flag ? 4 : length);
    } else {
      second = frame_.vector((modrm & 7) | off(1, 5) << 3 | off(1, 6) << 4);
    }
    const Vector old = frame_.vector(target);
    const Vector full = result(op, old, frame_.vector(first), second, length);
    const int k = p_[3] & 7;
    const uint64_t kept = k ? frame_.mask(k) : ~uint64_t(0);
    const bool zeroing = p_[3] >> 7;
    Vector out{};  // zero above the vector's length
    for (int i = 0; i < length; ++i) out.of[i] = kept >> i / step & 1 ? full.of[i] : (zeroing ? 0 : old.of[i]);
    frame_.set_vector(target, out);
    frame_.go_to(next);
    return true;
  }

 private:
  // Register numbers' upper bits are stored inverted.
  int off(int byte, int bit) const { return ~p_[byte] >> bit & 1; }

  // The memory operand's address; moves `next` past the instruction. Short displacements count in operands.
  const uint8_t* address(const uint8_t*& next, int unit) const {
    const int mod = p_[5] >> 6, rm = p_[5] & 7;
    int64_t sum = 0;
    bool base = true;
    if (rm == 4) {
      const int sib = *next++;
      const int index = (sib >> 3 & 7) | off(1, 6) << 3;
      if (index != 4) sum += frame_.general(index) << (sib >> 6);
      base = !((sib & 7) == 5 && mod == 0);
      if (base) sum += frame_.general((sib & 7) | off(1, 5) << 3);
    } else if (mod == 0 && rm == 5) {
      next += 4;
      return next + displacement(next - 4);
    } else {
      sum += frame_.general(rm | off(1, 5) << 3);
    }
    if (mod == 1) sum += int64_t(int8_t(*next++)) * unit;
    if (mod == 2 || !base) {
      sum += displacement(next);
      next += 4;
    }
    return reinterpret_cast<const uint8_t*>(sum);
  }
  static int32_t displacement(const uint8_t* p) {
    int32_t n;
    std::memcpy(&n, p, 4);
    return n;
  }

  static Vector result(Op op, const Vector& old, const Vector& first, const Vector& second, int length) {
    Vector out{};
    for (int i = 0; i < length; i += 4) {
      if (op == Op::vpdpbusd || op == Op::vpdpwssd) {
        int32_t sum;
        std::memcpy(&sum, old.of + i, 4);
        // wraps around, as the instruction does
        uint32_t total = uint32_t(sum);
        if (op == Op::vpdpbusd) {
          for (int j = i; j < i + 4; ++j) total += uint32_t(int32_t(first.of[j]) * int8_t(second.of[j]));
        } else {
          int16_t a[2], b[2];
          std::memcpy(a, first.of + i, 4);
          std::memcpy(b, second.of + i, 4);
          total += uint32_t(a[0] * b[0]) + uint32_t(a[1] * b[1]);
        }
        std::memcpy(out.of + i, &total, 4);
        continue;
      }
      for (int j = i; j < i + 4; ++j) {
        const int index = op == Op::vpermi2b ? old.of[j] : first.of[j];
        const Vector& low = op == Op::vpermb ? second : (op == Op::vpermi2b ? first : old);
        const bool upper = op != Op::vpermb && index & length;
        out.of[j] = (upper ? second : low).of[index & (length - 1)];
      }
    }
    return out;
  }

  Frame& frame_;
  const uint8_t* p_;
};

}  // namespace probe

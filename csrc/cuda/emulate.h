// The same kernels on a CPU, for tests without a GPU: every lane is a fiber, a block runs until all its lanes have run.
//
// What it checks beyond the arithmetic:
//   * every lane of a warp reaches the same collective (mma, shuffle, barrier), else the launch fails;
//   * every global address lies in a tensor that the launch named, every shared one in the block's memory, aligned;
//   * an asynchronous copy reaches shared memory only when the lane that issued it waits for it (until then its target
//     reads as NaN), and lanes run in a shuffled order, so that most missing waits and barriers give wrong results.
// What it can't: the hardware's memory model, timing, and races between lanes that this order happens not to show.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define KVQ_DEV inline
#define KVQ_UNROLL
#define KVQ_ROLLED
#define KVQ_GLOBAL(threads, blocks) inline void

namespace kvq {

struct alignas(16) Quad {
  uint32_t x, y, z, w;
};
struct alignas(8) Pair {
  uint32_t x, y;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};

namespace emulated {

struct Copy {
  char* to;
  const char* from;
};

struct Lane {
  std::unique_ptr<char[]> stack;
  ucontext_t start;
  jmp_buf at;
  int id = 0;
  bool begun = false, done = false;
  const uint64_t* waits = nullptr;  // the generation counter that this lane waits for
  uint64_t seen = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Meeting {
  int arrived = 0;
  uint64_t generation = 0;
  const char* what = nullptr;
};

struct Warp {
  Meeting meeting;
  alignas(16) uint32_t in[32][12];
  alignas(16) uint32_t out[32][4];
};

constexpr size_t STACK = 96 << 10;

struct Machine {
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  Meeting block;
  std::vector<char> shared_store;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  int threads = 0, x = 0, y = 0;
  Lane* self = nullptr;
  jmp_buf scheduler;
  std::string error;
  std::vector<std::pair<const char*, const char*>> ranges;
  void (*body)(const void*) = nullptr;
  const void* params = nullptr;
  std::mt19937 random{1};
};

inline Machine& machine() {
  static Machine m;
  return m;
}

[[noreturn]] inline void fail(const std::string& why) {
  machine().error = why;
  _longjmp(machine().scheduler, 1);
}

inline void allow(const void* p, int64_t bytes) {
  if (p && bytes > 0) machine().ranges.emplace_back(static_cast<const char*>(p), static_cast<const char*>(p) + bytes);
}

inline void check_global(const void* p, size_t bytes) {
  const char* c = static_cast<const char*>(p);
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("a global address is misaligned");
  for (auto& [first, last] : machine().ranges)
    if (c >= first && c + bytes <= last) return;
  fail("a global address lies outside all tensors");
}

inline void check_shared(const void* p, size_t bytes) {
  const char* c = static_cast<const char*>(p);
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("a shared address is misaligned");
  if (c < machine().shared || c + bytes > machine().shared + machine().shared_bytes)
    fail("a shared address lies outside the block's memory");
}

inline void yield() {
  if (!_setjmp(machine().self->at)) _longjmp(machine().scheduler, 1);
}

template <class F>
void meet(Meeting& m, int count, const char* what, F last) {
  if (m.arrived && m.what != what) fail(std::string("lanes meet at ") + m.what + " and at " + what);
  m.what = what;
  Lane* me = machine().self;
  me->waits = &m.generation;
  me->seen = m.generation;
  if (++m.arrived == count) {
    last();
    m.arrived = 0;
    ++m.generation;
  }
  yield();
}

inline Warp& warp() { return machine().warps[machine().self->id / 32]; }
inline int lane_id() { return machine().self->id % 32; }

inline void entry() {
  Machine& m = machine();
  m.body(m.params);
  m.self->done = true;
  _longjmp(m.scheduler, 1);
}

inline void run_block() {
  Machine& m = machine();
  std::memset(m.shared, 0xFF, m.shared_bytes);
  m.block = Meeting{};
  for (auto& w : m.warps) w.meeting = Meeting{};
  for (int i = 0; i < m.threads; ++i) {
    Lane& l = m.lanes[i];
    l.id = i;
    l.begun = l.done = false;
    l.waits = nullptr;
    l.open.clear();
    l.groups.clear();
  }
  std::vector<int> order(m.threads);
  std::iota(order.begin(), order.end(), 0);
  static int left;
  static bool moved;
  left = m.threads;
  while (left) {
    std::shuffle(order.begin(), order.end(), m.random);
    moved = false;
    for (int i : order) {
      Lane& l = m.lanes[i];
      if (l.done || (l.waits && *l.waits == l.seen)) continue;
      moved = true;
      l.waits = nullptr;
      m.self = &l;
      if (!_setjmp(m.scheduler)) {
        if (l.begun) _longjmp(l.at, 1);
        l.begun = true;
        if (!l.stack) l.stack = std::make_unique<char[]>(STACK);
        getcontext(&l.start);
        l.start.uc_stack.ss_sp = l.stack.get();
        l.start.uc_stack.ss_size = STACK;
        l.start.uc_link = nullptr;
        makecontext(&l.start, entry, 0);
        setcontext(&l.start);
      }
      if (!m.error.empty()) throw std::runtime_error("emulated kernel: " + m.error);
      if (m.self->done) --left;
    }
    if (!moved) throw std::runtime_error("emulated kernel: lanes wait for others that have left");
  }
}

inline float half_value(uint16_t h) {
  static const std::vector<float> table = [] {
    std::vector<float> t(65536);
    for (int i = 0; i < 65536; ++i) {
      const uint16_t bits = uint16_t(i);
      _Float16 x;
      std::memcpy(&x, &bits, 2);
      t[i] = float(x);
    }
    return t;
  }();
  return table[h];
}

inline uint16_t half_bits(float x) {
  const _Float16 h = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}

inline void multiply(Warp& w) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l >> 2, t = l & 3;
    for (int r = 0; r < 4; ++r)
      for (int h = 0; h < 2; ++h)
        a[g + 8 * (r & 1)][2 * t + h + 8 * (r >> 1)] = half_value(uint16_t(w.in[l][r] >> (16 * h)));
    for (int r = 0; r < 2; ++r)
      for (int h = 0; h < 2; ++h) b[2 * t + h + 8 * r][g] = half_value(uint16_t(w.in[l][4 + r] >> (16 * h)));
  }
  for (int l = 0; l < 32; ++l) {
    const int g = l >> 2, t = l & 3;
    for (int r = 0; r < 4; ++r) {
      float c;
      std::memcpy(&c, &w.in[l][6 + r], 4);
      for (int k = 0; k < 16; ++k) c += a[g + 8 * (r >> 1)][k] * b[k][2 * t + (r & 1)];
      std::memcpy(&w.out[l][r], &c, 4);
    }
  }
}

}  // namespace emulated

// -- what lanes.h declares for the GPU ---------------------------------------------------------------------------------
inline int lane() { return emulated::lane_id(); }
inline int warp_index() { return emulated::machine().self->id / 32; }
inline int thread_index() { return emulated::machine().self->id; }
inline int block_x() { return emulated::machine().x; }
inline int block_y() { return emulated::machine().y; }
inline char* shared_memory() { return emulated::machine().shared; }

template <class T>
T load(const T* p) {
  emulated::check_global(p, sizeof(T));
  return *p;
}
template <class T>
void store(T* p, T x) {
  emulated::check_global(p, sizeof(T));
  *p = x;
}
template <class T>
T from_shared(const void* p) {
  emulated::check_shared(p, sizeof(T));
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
void to_shared(void* p, T x) {
  emulated::check_shared(p, sizeof(T));
  std::memcpy(p, &x, sizeof x);
}

inline void add_atomically(int32_t* p, int32_t x) { store(p, load(p) + x); }

inline void copy_async(void* to, const void* from) {
  emulated::check_shared(to, 16);
  emulated::check_global(from, 16);
  std::memset(to, 0xFF, 16);
  emulated::machine().self->open.push_back({static_cast<char*>(to), static_cast<const char*>(from)});
}
inline void copy_commit() {
  auto& me = *emulated::machine().self;
  me.groups.push_back(std::move(me.open));
  me.open.clear();
}
template <int PENDING>
void copy_wait() {
  auto& groups = emulated::machine().self->groups;
  for (; groups.size() > PENDING; groups.pop_front())
    for (auto& c : groups.front()) std::memcpy(c.to, c.from, 16);
}

inline void sync_warp() {
  emulated::meet(emulated::warp().meeting, 32, "a warp barrier", [] {});
}
inline void sync_block() {
  emulated::meet(emulated::machine().block, emulated::machine().threads, "a block barrier", [] {});
}

inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& w = emulated::warp();
  uint32_t* in = w.in[lane()];
  std::memcpy(in, a, 16);
  in[4] = b0;
  in[5] = b1;
  std::memcpy(in + 6, c, 16);
  emulated::meet(w.meeting, 32, "a matrix product", [&] { emulated::multiply(w); });
  std::memcpy(c, w.out[lane()], 16);
}

inline uint32_t exchange(uint32_t x, int from) {
  auto& w = emulated::warp();
  w.in[lane()][0] = x;
  w.in[lane()][1] = uint32_t(from);
  emulated::meet(w.meeting, 32, "a shuffle", [&] {
    for (auto l = 0; l < 32; ++l) w.out[l][0] = w.in[w.in[l][1] & 31][0];
  });
  return w.out[lane()][0];
}
inline float shuffle(float x, int from) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = exchange(bits, from);
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float shuffle_xor(float x, int mask) { return shuffle(x, lane() ^ mask); }

inline uint32_t transpose(uint32_t x) {
  auto& w = emulated::warp();
  w.in[lane()][0] = x;
  emulated::meet(w.meeting, 32, "a transposition", [&] {
    auto at = [&](int row, int column) { return uint16_t(w.in[4 * row + column / 2][0] >> (16 * (column & 1))); };
    for (int l = 0; l < 32; ++l)
      w.out[l][0] = at(2 * (l & 3), l >> 2) | uint32_t(at(2 * (l & 3) + 1, l >> 2)) << 16;
  });
  return w.out[lane()][0];
}

inline bool any(bool x) {
  auto& w = emulated::warp();
  w.in[lane()][0] = x;
  emulated::meet(w.meeting, 32, "a vote", [&] {
    uint32_t all = 0;
    for (int l = 0; l < 32; ++l) all |= w.in[l][0];
    for (int l = 0; l < 32; ++l) w.out[l][0] = all;
  });
  return w.out[lane()][0] != 0;
}

inline float half_to_float(uint16_t h) { return emulated::half_value(h); }
inline uint16_t float_to_half(float x) { return emulated::half_bits(x); }
inline uint32_t pack_halves(float low, float high) { return float_to_half(low) | uint32_t(float_to_half(high)) << 16; }
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  const float low = half_to_float(uint16_t(a)) * half_to_float(uint16_t(b));
  return pack_halves(low, half_to_float(uint16_t(a >> 16)) * half_to_float(uint16_t(b >> 16)));
}
// 0x5410: the low halves of a and b; 0x7632: the high ones
template <uint32_t SELECT>
uint32_t permute(uint32_t a, uint32_t b) {
  const uint64_t both = a | uint64_t(b) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t((both >> (8 * ((SELECT >> (4 * i)) & 7))) & 255) << (8 * i);
  return out;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_of(float x) { return std::log2(x); }
inline float larger(float a, float b) { return std::fmax(a, b); }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float divide(float a, float b) { return a / b; }
inline float square_root(float x) { return std::sqrt(x); }
inline float nearest(float x) { return std::nearbyint(x); }
inline float bits_to_float(uint32_t x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}
inline uint32_t high_product(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }

template <class P>
void launch(void (*kernel)(P), int x, int y, int threads, int shared_bytes, void*, const P& params) {
  auto& m = emulated::machine();
  static void (*now)(P);
  now = kernel;
  m.body = [](const void* p) { now(*static_cast<const P*>(p)); };
  m.params = &params;
  m.threads = threads;
  m.error.clear();
  if (m.lanes.size() < size_t(threads)) m.lanes = std::vector<emulated::Lane>(threads);
  m.warps.resize(threads / 32);
  m.shared_store.resize(shared_bytes + 128);
  m.shared = m.shared_store.data() + (-reinterpret_cast<uintptr_t>(m.shared_store.data()) & 127);
  m.shared_bytes = shared_bytes;
  for (m.y = 0; m.y < y; ++m.y)
    for (m.x = 0; m.x < x; ++m.x) emulated::run_block();
}

}  // namespace kvq

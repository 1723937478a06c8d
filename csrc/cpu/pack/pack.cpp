// The driver of packing: checks, SQuat's small matrices, and one task per KV head and run of units of one page; no two
// threads write to the same record.
#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../dispatch/isa.h"
#include "../scratch.h"
#include "../threads.h"

namespace kvq {
namespace {

void inside(int64_t i, int64_t limit, const char* what) {
  if (i < 0 || i >= limit)
    throw std::out_of_range(std::string(what) + " " + std::to_string(i) + " is not one of " + std::to_string(limit));
}

// M U_t with M = (I rho + U_R U_R^T)^-1, R = channels from block t on (formats/methods/squat.py), for one KV head.
void pull_of(const float* u, int64_t rank, int64_t d, int64_t block, double rho, float* pull) {
  double m[MAX_RANK][MAX_RANK] = {};
  for (int64_t start = (d - 1) / block * block, end = d; start > 0; end = start, start -= block) {
    for (int64_t i = 0; i < rank; ++i)  // the sum grows from the last block to the first
      for (int64_t j = 0; j <= i; ++j)
        for (int64_t c = start; c < end; ++c) m[i][j] += double(u[i * d + c]) * u[j * d + c];
    double l[MAX_RANK][MAX_RANK];
    for (int64_t i = 0; i < rank; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        double x = m[i][j] + (i == j ? rho : 0.0);
        for (int64_t k = 0; k < j; ++k) x -= l[i][k] * l[j][k];
        l[i][j] = i == j ? std::sqrt(x) : x / l[j][j];
      }
    for (int64_t c = start; c < end; ++c) {
      double x[MAX_RANK];
      for (int64_t i = 0; i < rank; ++i) {
        x[i] = u[i * d + c];
        for (int64_t k = 0; k < i; ++k) x[i] -= l[i][k] * x[k];
        x[i] /= l[i][i];
      }
      for (int64_t i = rank - 1; i >= 0; --i) {
        for (int64_t k = i + 1; k < rank; ++k) x[i] -= l[k][i] * x[k];
        x[i] /= l[i][i];
        pull[i * d + c] = float(x[i]);
      }
    }
  }
}

class Packer {
 public:
  explicit Packer(const Pack& p) : p_(p), l_(p.layout), units_(p.units), kernels_(isa(p.team.isa).pack) {}

  int64_t run() {
    check();
    std::vector<int64_t> runs;  // first unit of each
    for (int64_t i = 0; i < units_.count; ++i)
      if (!i || units_.page[i] != units_.page[i - 1]) runs.push_back(i);
    if (corrected()) {
      pulls_.reset(new float[p_.owners * p_.pool.heads * p_.state_rows * l_.d]);
      parallel(p_.team.threads, p_.owners * p_.pool.heads, [&](int64_t i) {
        const int64_t rank = p_.state_rows - 1, size = p_.state_rows * l_.d;
        const float* u = p_.state + i * size;
        const double noise = u[rank * l_.d], rho = std::max(1 / l_.lambda, l_.noise_floor * noise);
        pull_of(u, rank, l_.d, l_.squat_block, rho, pulls_.get() + i * size);
      });
    }
    const int64_t count = int64_t(runs.size());
    runs.push_back(units_.count);
    parallel(p_.team.threads, count * p_.pool.heads, [&](int64_t i) {
      for (int64_t u = runs[i / p_.pool.heads]; u < runs[i / p_.pool.heads + 1]; ++u) unit(u, i % p_.pool.heads);
    });
    return replaced_;
  }

 private:
  bool corrected() const { return (l_.keys == Keys::channel || l_.keys == Keys::boosted) && p_.state; }

  void check() const {
    const int64_t limit = p_.old.rows() + p_.fresh.rows();
    if (corrected() && (p_.state_rows < 1 || p_.state_rows - 1 > MAX_RANK || l_.squat_block < 16 || l_.squat_block % 16))
      throw std::out_of_range("SQuat's rank or block is out of range");
    for (int64_t i = 0; l_.keys == Keys::transformed && units_.count && i < p_.pool.heads * l_.slots; ++i) {
      const int32_t* channel = p_.constants.places + i / l_.slots * 2 * l_.slots + i % l_.slots;
      inside(*channel, l_.d, "channel");
      inside(channel[l_.slots], 32, "shift");
    }
    for (int64_t i = 0; i < units_.count; ++i) {
      inside(units_.page[i], p_.pool.pages, "page id");
      inside(units_.unit[i], l_.tokens / units_.tokens, "unit");
      if (p_.state) inside(units_.owner[i], p_.owners, "owner");
      for (int64_t t = 0; t < units_.tokens; ++t) inside(units_.rows[i * units_.tokens + t], limit, "row");
    }
  }

  void unit(int64_t i, int64_t head) {
    thread_local Scratch scratch;
    const int64_t tokens = units_.tokens, d = l_.d, slabs = tokens / SLAB;
    char* memory = scratch.reserve(8 * size_t(tokens * d) + kernels_.work_bytes(l_, tokens));
    float *key = reinterpret_cast<float*>(memory), *value = key + tokens * d;
    int64_t lost = 0;
    for (int64_t t = 0; t < tokens; ++t) lost += read(units_.rows[i * tokens + t], head, key + t * d, value + t * d);
    if (lost) replaced_ += lost;
    PackUnit u{};
    u.layout = &l_;
    const Constants constants = of_head(p_.constants, l_, head);
    u.constants = &constants;
    u.tokens = tokens;
    u.key = key;
    u.value = value;
    u.record = p_.pool.records + units_.page[i] * p_.pool.page_stride + head * p_.pool.head_stride;
    u.slabs = u.record + l_.slabs_at + units_.unit[i] * slabs * l_.slab_bytes;
    if (p_.state) {
      const int64_t at = (units_.owner[i] * p_.pool.heads + head) * p_.state_rows * d;
      u.state = p_.state + at;
      if (pulls_) u.pull = pulls_.get() + at;
    }
    u.state_rows = p_.state_rows;
    u.follows = p_.state && units_.follows[i];
    u.position = units_.position[i];
    u.work = reinterpret_cast<char*>(value + tokens * d);
    kernels_.pack(u);
    std::memcpy(u.record, &PAGE_MAGIC, 4);
    if (l_.keys == Keys::transformed) {
      const int32_t first = int32_t(u.position - units_.unit[i] * tokens);
      std::memcpy(u.record + POSITION_AT, &first, 4);
    }
    std::memset(u.record + FLAGS_AT + units_.unit[i] * slabs, 1, slabs);
  }

  int64_t read(int64_t row, int64_t head, float* key, float* value) const {
    const int64_t stored = p_.old.rows();
    const Tokens& from = row < stored ? p_.old : p_.fresh;
    if (row >= stored) row -= stored;
    const int64_t block = row / from.slots, slot = row % from.slots;
    const auto get = [&](const void* base, const int64_t* s, float* to) {
      return kernels_.read(element(base, p_.dtype, block * s[0] + slot * s[1] + head * s[2]), p_.dtype, l_.head_size, l_.d,
                           to);
    };
    return get(from.key, from.key_strides, key) + get(from.value, from.value_strides, value);
  }

  const Pack& p_;
  const Layout& l_;
  const Units& units_;
  const PackKernels& kernels_;
  std::unique_ptr<float[]> pulls_;
  std::atomic<int64_t> replaced_{0};
};

}  // namespace

int64_t pack(const Pack& p) { return Packer(p).run(); }

void store(const Store& s) {
  for (int64_t i = 0; i < s.count; ++i) {
    inside(s.rows[i], s.to.rows(), "row");
    inside(s.source[i], s.from.rows(), "new token");
  }
  const size_t bytes = s.head_size * (s.dtype == Dtype::f32 ? 4 : 2);
  const auto copy = [&](const void* to, const int64_t* into, const void* from, const int64_t* out, int64_t i) {
    const int64_t row = s.rows[i], source = s.source[i];
    for (int64_t h = 0; h < s.heads; ++h)
      // clang-format off
      std::memcpy(const_cast<char*>(element(to, s.dtype, row / s.to.slots * into[0] + row % s.to.slots * into[1] +
                                                             h * into[2])),
                  element(from, s.dtype, source / s.from.slots * out[0] + source % s.from.slots * out[1] + h * out[2]),
                  bytes);
    // clang-format on
  };
  for (int64_t i = 0; i < s.count; ++i) {
    copy(s.to.key, s.to.key_strides, s.from.key, s.from.key_strides, i);
    copy(s.to.value, s.to.value_strides, s.from.value, s.from.value_strides, i);
  }
}

int64_t unpacked_page(const Layout& l, const Pool& pool, const PageList& list) {
  for (int64_t i = 0; i < list.count; ++i) {
    const uint8_t* header = pool.records + list.ids[i] * pool.page_stride;
    const int64_t first = std::max<int64_t>(list.low[i], 0), last = std::min<int64_t>(list.high[i], l.tokens);
    bool packed = first >= last || std::memcmp(header, &PAGE_MAGIC, 4) == 0;
    for (int64_t slab = first / SLAB; slab * SLAB < last; ++slab) packed = packed && header[FLAGS_AT + slab] == 1;
    if (!packed) return i;
  }
  return -1;
}

}  // namespace kvq

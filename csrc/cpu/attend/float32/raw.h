//     s_t = q . k_t,  P = 2^(s - m),  O = O + P v
//
// Attention over full-precision tokens, 32 at a time, wherever they lie (see RawTask in dispatch/attend_kernels.h).
#pragma once

#include "cap.h"
#include "keys.h"

namespace {
namespace float32 {

// k[c][t] and v[t][c] in float32; absent tokens are 0
inline void gather(const RawTask& task, float* k, float* v) {
  const int d = task.head_size, padded = task.d;
  float row[LARGEST_HEAD];
  std::memset(v, 0, 4 * size_t(padded) * SLAB);
  for (int t = 0; t < SLAB; ++t) {
    if (task.key[t]) {
      read_raw(static_cast<const uint8_t*>(task.key[t]), task.dtype, d, row);
      for (int c = 0; c < d; ++c) k[c * SLAB + t] = row[c];
      read_raw(static_cast<const uint8_t*>(task.value[t]), task.dtype, d, v + t * padded);
    } else {
      for (int c = 0; c < d; ++c) k[c * SLAB + t] = 0;
    }
  }
}

inline Floats as_floats(Ints bits) {
  Floats x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// LANES 16-bit numbers, the upper halves 0. Spelled out: g++ takes a vector's conversion apart.
inline Ints load_shorts(const uint16_t* p) {
  Ints wide;
#if KVQ_LANES == 16
  const __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif KVQ_LANES == 8
  const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  uint16_t __attribute__((vector_size(2 * LANES))) bits;
  std::memcpy(&bits, p, sizeof bits);
  const Ints v = __builtin_convertvector(bits, Ints);
#endif
  std::memcpy(&wide, &v, sizeof v);
  return wide;
}

// LANES elements of a token from element c on
inline Floats token_lanes(const void* token, int c, Dtype dtype) {
  if (dtype == Dtype::f32) return load(static_cast<const float*>(token) + c);
  const Ints b = load_shorts(static_cast<const uint16_t*>(token) + c);
  if (dtype == Dtype::bf16) return as_floats(b << 16);
  const Ints magnitude = b & 0x7fff;  // half_or_nan of half.h
  const Floats x = as_floats(magnitude << 13) * 0x1p112f;
  Ints bits;
  std::memcpy(&bits, &x, sizeof x);
  const Ints nan = magnitude > 0x7c00;
  return as_floats((nan & 0x7fc00000) | (~nan & (bits | (b & 0x8000) << 16)));
}

// A few rows (decode): a token's key and value meet all of them in registers, without turning keys around. T tokens at
// once, because a product must wait for the previous one in the same sum.
template <int R, int T, Dtype DTYPE>
inline void few_scores(const RawTask& task, int first, int t, const void* const* key, float* scores) {
  Floats acc[T][R] = {};
  for (int c = 0; c < task.head_size; c += LANES) {
    Floats k[T];
    for (int i = 0; i < T; ++i) k[i] = token_lanes(key[t + i], c, DTYPE);
    for (int r = 0; r < R; ++r) {
      const Floats q = load(task.query + (first + r) * task.d + c);
      for (int i = 0; i < T; ++i) acc[i][r] += q * k[i];
    }
  }
  for (int i = 0; i < T; ++i) {
    float sums[R];
    sum_each(acc[i], sums);
    for (int r = 0; r < R; ++r) scores[(first + r) * SLAB + t + i] = sums[r];
  }
}

template <int T>
struct Together {
  static constexpr int count = T;
};

// some(Together<T>, t, keys) for all tokens, two at a time; the key of an absent one is another's, and hidden
// afterwards.
template <class Some>
inline void by_twos(const RawTask& task, Some some) {
  const int bytes = task.head_size * (task.dtype == Dtype::f32 ? 4 : 2);
  const void *key[SLAB], *present = nullptr;
  for (int t = 0; t < task.tokens; ++t) present = task.key[t] ? task.key[t] : present;
  for (int t = 0; t < task.tokens; ++t) key[t] = task.key[t] ? task.key[t] : present;
  const auto fetch = [&](int t) __attribute__((always_inline)) {
    if (t + RAW_AHEAD < task.tokens) prefetch_token(key[t + RAW_AHEAD], bytes);
    prefetch_token(task.value[t], bytes);
  };
  int t = 0;
  for (; t + 2 <= task.tokens; t += 2) {
    fetch(t);
    fetch(t + 1);
    some(Together<2>{}, t, key);
  }
  if (t < task.tokens) some(Together<1>{}, t, key);
}

template <int R, Dtype DTYPE>
inline void few_scores(const RawTask& task, int first, float* scores) {
  by_twos(task, [&](auto tokens, int t, const void* const* key) {
    few_scores<R, decltype(tokens)::count, DTYPE>(task, first, t, key, scores);
  });
}

// V vectors of channels from c on, held in registers over all tokens
template <int R, int V, Dtype DTYPE>
inline void few_outputs(const RawTask& task, int first, int c, const float* p) {
  float* out = task.out + first * task.d + c;
  Floats acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * task.d + v * LANES);
  for (int t = 0; t < task.tokens; ++t) {
    if (!task.value[t]) continue;
    for (int v = 0; v < V; ++v) {
      const Floats x = token_lanes(task.value[t], c + v * LANES, DTYPE);
      for (int r = 0; r < R; ++r) acc[r][v] += splat(p[(first + r) * SLAB + t]) * x;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * task.d + v * LANES, acc[r][v]);
}

template <int R, Dtype DTYPE>
inline void few_outputs(const RawTask& task, int first, const float* p) {
  constexpr int V = LANES / 4;  // 16 vectors of 4 rows fit the registers of AVX-512, 8 those of AVX2
  int c = 0;
  for (; c + V * LANES <= task.head_size; c += V * LANES) few_outputs<R, V, DTYPE>(task, first, c, p);
  for (; c < task.head_size; c += LANES) few_outputs<R, 1, DTYPE>(task, first, c, p);
}

template <class Four, class One>
inline void by_fours(int rows, Four four, One one) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) four(r);
  for (; r < rows; ++r) one(r);
}

template <Dtype DTYPE>
inline void few_scores(const RawTask& task, float* scores) {
  // clang-format off
  by_fours(task.rows, [&](int r) { few_scores<4, DTYPE>(task, r, scores); },
                  [&](int r) { few_scores<1, DTYPE>(task, r, scores); });
  // clang-format on
}

template <Dtype DTYPE>
inline void few_outputs(const RawTask& task, const float* p) {
  // clang-format off
  by_fours(task.rows, [&](int r) { few_outputs<4, DTYPE>(task, r, p); },
                  [&](int r) { few_outputs<1, DTYPE>(task, r, p); });
  // clang-format on
}

constexpr int FEW_ROWS = 8;

inline void few_scores(const RawTask& task, float* scores) {
  if (task.dtype == Dtype::f32) return few_scores<Dtype::f32>(task, scores);
  if (task.dtype == Dtype::f16) return few_scores<Dtype::f16>(task, scores);
  few_scores<Dtype::bf16>(task, scores);
}

inline void few_outputs(const RawTask& task, const float* p) {
  if (task.dtype == Dtype::f32) return few_outputs<Dtype::f32>(task, p);
  if (task.dtype == Dtype::f16) return few_outputs<Dtype::f16>(task, p);
  few_outputs<Dtype::bf16>(task, p);
}

// Which of 32 tokens a query sees, as a mask of all bits per lane; `present`: the tokens that are there.
inline void hide_unseen(const uint8_t* seen, const uint8_t* present, int tokens, float* scores) {
  using Bytes = uint8_t __attribute__((vector_size(LANES)));
  uint8_t row[SLAB] = {};
  std::memcpy(row, seen, size_t(tokens));
  for (int t = 0; t < SLAB; t += LANES) {
    Bytes a, b;
    std::memcpy(&a, row + t, sizeof a);
    std::memcpy(&b, present + t, sizeof b);
    const Ints visible = __builtin_convertvector(a & b, Ints);
    store(scores + t, visible != 0 ? load(scores + t) : splat(-1e30f));
  }
}

// score(task, scores) for few rows
template <class Score>
inline void add_raw(RawTask& task, Score score) {
  const bool few = task.rows <= FEW_ROWS;
  float* k = task.work;
  float* v = k + task.d * SLAB;
  float* scores = v + task.d * SLAB;
  if (few) {
    std::memset(scores, 0, 4 * size_t(task.rows) * SLAB);
    score(task, scores);
  } else {
    if (!task.gathered) gather(task, k, v);
    task.gathered = true;
    multiply(task.query, task.d, task.rows, task.head_size, k, SLAB, scores, SLAB);
  }
  if (task.cap > 0) cap(scores, SLAB, task.rows, SLAB, task.cap);
  uint8_t present[SLAB];
  for (int t = 0; t < SLAB; ++t) present[t] = task.key[t] ? 1 : 0;
  for (int r = 0; r < task.rows; ++r) {
    float* s = scores + r * SLAB;
    const uint8_t* seen = task.seen + (task.first_row + r) / task.group * task.seen_stride;
    if (!task.all_seen) hide_unseen(seen, present, task.tokens, s);
    Floats best = load(s);
    for (int t = LANES; t < SLAB; t += LANES) best = max(best, load(s + t));
    const float block_top = largest(best), top = block_top > task.top[r] ? block_top : task.top[r];
    const float shrink = exp2(splat(task.top[r] - top))[0];
    Floats total{};
    for (int t = 0; t < SLAB; t += LANES) {
      const Floats x = load(s + t);
      const Floats p = x > -1e29f ? exp2(x - top) : Floats{};
      store(s + t, p);
      total += p;
    }
    task.top[r] = top;
    task.total[r] = task.total[r] * shrink + sum(total);
    for (int c = 0; shrink != 1.0f && c < task.d; c += LANES)
      store(task.out + r * task.d + c, load(task.out + r * task.d + c) * shrink);
  }
  if (few) return few_outputs(task, scores);
  for (int c = 0; c < task.d; c += SLAB)
    multiply<true>(scores, SLAB, task.rows, task.tokens, v + c, task.d, task.out + c, task.d);
}

inline void add_raw(RawTask& task) {
  add_raw(task, [](const RawTask& t, float* scores) { few_scores(t, scores); });
}

}  // namespace float32
}  // namespace

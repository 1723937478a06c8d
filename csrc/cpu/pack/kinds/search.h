//     code = round(clamp(y / (scale step) + most / 2, 0, most))        y ~ (code - most / 2) step scale
//
// One scale per token, the best of some (formats/parts/search.py): transformed keys and the values that go with them.
#pragma once

#include "affine.h"

namespace {
namespace float32 {

constexpr int FACTORS = 6;
constexpr float FACTOR[FACTORS] = {0.8f, 1.0f, 1.25f, 1.6f, 2.2f, 3.5f};
constexpr float LEAST = 1e-30f;

// By channel: the step, the largest code (0: not stored), and the weight of an error.
struct Levels {
  const float *step, *most, *weight;
};

// A token by channel: y by the step, and the weight of an error in steps; both 0 where nothing is stored.
struct Steps {
  float x[LARGEST_HEAD], weight[LARGEST_HEAD];
  const float* most;
  int64_t d;
};

// x: by the scale, too
inline Floats searched_code(Floats x, Floats half, Floats most) { return nearest(min(max(x + half, Floats{}), most)); }

// The errors with N scales. Each channel's numbers are read once, for all of them.
template <int N>
inline void scale_errors(const Steps& token, const float* scale, float* error) {
  float inverse[N];
  for (int i = 0; i < N; ++i) inverse[i] = 1.0f / scale[i];
  Floats errors[N] = {};
  for (int64_t c = 0; c < token.d; c += LANES) {
    const Floats x = load(token.x + c), weight = load(token.weight + c), most = load(token.most + c), half = most / 2.0f;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      const Floats e = (searched_code(x * inverse[i], half, most) - half) * scale[i] - x;
      errors[i] += e * e * weight;
    }
  }
  for (int i = 0; i < N; ++i) error[i] = sum(errors[i]);
}

// The scale that fits the codes with `scale` best.
inline float fitted_scale(const Steps& token, float scale) {
  const float by = 1.0f / scale;
  Floats seen{}, size{};
  for (int64_t c = 0; c < token.d; c += LANES) {
    const Floats x = load(token.x + c), most = load(token.most + c), half = most / 2.0f;
    const Floats level = searched_code(x * by, half, most) - half, weighed = level * load(token.weight + c);
    seen += x * weighed;
    size += level * weighed;
  }
  return sum(seen) / __builtin_fmaxf(sum(size), LEAST);
}

inline float scale_of(int byte) { return half_to_float(uint16_t(byte << SCALE_SHIFT)); }

// The byte of the first of four scales around x (formats/parts/scales.py).
inline int first_around(float x) {
  const int first = (float_to_half(__builtin_fmaxf(x, 0.0f)) >> SCALE_SHIFT) - 1, last = LARGEST_SCALE - SCALES_AROUND + 1;
  if (first < 1) return 1;
  return first < last ? first : last;
}

inline int least(const float* error, int count) {
  int best = 0;
  for (int i = 1; i < count; ++i)
    if (error[i] < error[best]) best = i;
  return best;
}

// The byte of a token's scale, and codes for it.
inline uint8_t searched(const float* y, int64_t d, const Levels& levels, int32_t* codes) {
  Steps token;
  token.most = levels.most;
  token.d = d;
  Floats squares{}, stored{};
  for (int64_t c = 0; c < d; c += LANES) {
    const Floats step = load(levels.step + c), v = load(y + c);
    const Ints kept = Ints(load(levels.most + c) > 0.0f);
    squares += kept ? v * v : Floats{};
    stored += kept ? splat(1.0f) : Floats{};
    store(token.x + c, kept ? v / step : Floats{});
    store(token.weight + c, load(levels.weight + c) * step * step);
  }
  const float rms = __builtin_sqrtf(sum(squares) / sum(stored));
  float tried[FACTORS], error[FACTORS];
  for (int f = 0; f < FACTORS; ++f) tried[f] = __builtin_fmaxf(FACTOR[f] * rms, TINY);
  scale_errors<FACTORS>(token, tried, error);
  const int first = first_around(fitted_scale(token, tried[least(error, FACTORS)]));
  float around[SCALES_AROUND];
  for (int i = 0; i < SCALES_AROUND; ++i) around[i] = scale_of(first + i);
  scale_errors<SCALES_AROUND>(token, around, error);
  const int best = least(error, SCALES_AROUND);
  const float by = 1.0f / around[best];
  for (int64_t c = 0; c < d; c += LANES) {
    const Floats most = load(levels.most + c);
    const Ints code = to_ints(searched_code(load(token.x + c) * by, most / 2.0f, most));
    std::memcpy(codes + c, &code, sizeof code);
  }
  return uint8_t(first + best);
}

// `work` holds codes [32][d] and v H / sqrt(b), [32][d].
inline void pack_searched_values(const Layout& l, const float* value, uint8_t* slab, char* work) {
  const int64_t d = l.d, low = low_value_bits(l);
  int32_t* codes = reinterpret_cast<int32_t*>(work);
  float* rotated = reinterpret_cast<float*>(codes + SLAB * d);
  float step[LARGEST_HEAD], most[LARGEST_HEAD], weight[LARGEST_HEAD];
  for (int64_t c = 0; c < d; ++c) {
    step[c] = float(l.value_step);
    most[c] = float((1 << l.value_bits) - 1);
    weight[c] = 1;
  }
  rotate_values(value, d, rotated);
  uint8_t* scale = slab + l.v_scale;
  for (int t = 0; t < SLAB; ++t) scale[t] = searched(rotated + t * d, d, {step, most, weight}, codes + t * d);
  if (l.value_bits > low) {
    int32_t* high = reinterpret_cast<int32_t*>(rotated);
    for (int64_t i = 0; i < SLAB * d; ++i) {
      high[i] = codes[i] >> low;
      codes[i] &= (1 << low) - 1;
    }
    put_value_codes(high, d, 1, slab + l.v_high);
  }
  put_value_codes(codes, d, int(low), slab + l.v_codes);
}

}  // namespace float32
}  // namespace

//     code = round(clamp(y / (scale step) + most / 2, 0, most))        y ~ (code - most / 2) step scale
//
// One scale per token, the best of some (formats/parts/search.py): transformed keys and the values that go with them.
#pragma once

#include "affine.h"

namespace {
namespace float32 {

constexpr int FACTORS = 10, PLACES = 16;  // whole vectors
constexpr float FACTOR[PLACES] = {0.7f, 0.81f, 0.94f, 1.08f, 1.25f, 1.45f, 1.7f, 2.0f, 2.6f, 4.0f, 1, 1, 1, 1, 1, 1};
static_assert(PLACES % LANES == 0);
constexpr float LEAST = 1e-30f;

// By channel: the step, the largest code (0: not stored), and the weight of an error.
struct Levels {
  const float *step, *most, *weight;
};

// x: y by the step and by the scale
inline Floats searched_code(Floats x, Floats half, Floats most) { return nearest(min(max(x + half, Floats{}), most)); }

// The scale of a token's y, and codes for it. Each channel's numbers are read once, for all factors.
inline float searched(const float* y, int64_t d, const Levels& levels, int32_t* codes) {
  Floats squares{}, stored{};
  for (int64_t c = 0; c < d; c += LANES) {
    const Ints kept = Ints(load(levels.most + c) > 0.0f);
    squares += kept ? load(y + c) * load(y + c) : Floats{};
    stored += kept ? splat(1.0f) : Floats{};
  }
  const float rms = __builtin_sqrtf(sum(squares) / sum(stored));
  float scale[PLACES], inverse[PLACES], steps[LARGEST_HEAD];  // steps: y / step
  for (int f = 0; f < PLACES; f += LANES) {
    const Floats s = positive_half(load(FACTOR + f) * rms);
    store(scale + f, s);
    store(inverse + f, 1.0f / s);
  }
  Floats errors[FACTORS] = {};
  for (int64_t c = 0; c < d; c += LANES) {
    const Floats step = load(levels.step + c), most = load(levels.most + c), half = most / 2.0f, v = load(y + c);
    const Floats weight = load(levels.weight + c), x = v / max(step, splat(1e-9f));
    store(steps + c, x);
#pragma GCC unroll 10
    for (int f = 0; f < FACTORS; ++f) {
      const Floats e = (searched_code(x * inverse[f], half, most) - half) * step * scale[f] - v;
      errors[f] += e * e * weight;
    }
  }
  int best = 0;
  float least = sum(errors[0]);
  for (int f = 1; f < FACTORS; ++f)
    if (const float error = sum(errors[f]); error < least) {
      least = error;
      best = f;
    }
  Floats seen{}, size{};
  for (int64_t c = 0; c < d; c += LANES) {
    const Floats most = load(levels.most + c), half = most / 2.0f;
    const Floats level = (searched_code(load(steps + c) * inverse[best], half, most) - half) * load(levels.step + c);
    const Floats weighed = level * load(levels.weight + c);
    seen += load(y + c) * weighed;
    size += level * weighed;
  }
  const float fitted = positive_half(splat(sum(seen) / __builtin_fmaxf(sum(size), LEAST)))[0], by = 1.0f / fitted;
  for (int64_t c = 0; c < d; c += LANES) {
    const Floats most = load(levels.most + c);
    const Ints code = to_ints(searched_code(load(steps + c) * by, most / 2.0f, most));
    std::memcpy(codes + c, &code, sizeof code);
  }
  return fitted;
}

// `work` holds codes [32][d] and v H / sqrt(b), [32][d].
inline void pack_searched_values(const Layout& l, const float* value, uint8_t* slab, char* work) {
  const int64_t d = l.d, low = low_value_bits(l);
  int32_t* codes = reinterpret_cast<int32_t*>(work);
  float* rotated = reinterpret_cast<float*>(codes + SLAB * d);
  float step[LARGEST_HEAD], most[LARGEST_HEAD], weight[LARGEST_HEAD], scale[SLAB];
  for (int64_t c = 0; c < d; ++c) {
    step[c] = float(l.value_step);
    most[c] = float((1 << l.value_bits) - 1);
    weight[c] = 1;
  }
  rotate_values(value, d, rotated);
  for (int t = 0; t < SLAB; ++t) scale[t] = searched(rotated + t * d, d, {step, most, weight}, codes + t * d);
  for (int t = 0; t < SLAB; t += LANES) store_halves(slab + l.v_scale + 2 * t, load(scale + t));
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

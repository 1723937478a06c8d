//     code = round(clamp(y / (scale step) + most / 2, 0, most))        y ~ (code - most / 2) step scale
//
// One scale per token, found by trying some (formats/parts/search.py): transformed keys and the values that go with them.
#pragma once

#include "affine.h"

namespace {
namespace float32 {

constexpr float FACTORS[] = {0.7f, 0.85f, 1.0f, 1.2f, 1.45f, 1.75f, 2.1f, 2.6f, 3.2f, 4.0f};  // as formats/parts/search.py

// By channel: the step, the largest code (0: not stored), and the weight of an error.
struct Levels {
  const float *step, *most, *weight;
};

inline Floats searched_code(Floats y, Floats scale, Floats step, Floats most) {
  const Floats x = y / (scale * max(step, splat(1e-9f))) + most / 2.0f;
  return nearest(min(max(x, Floats{}), most));
}

// The scale of a token's y, and codes for it.
inline float searched(const float* y, int64_t d, const Levels& levels, int32_t* codes) {
  Floats squares{}, stored{};
  for (int64_t c = 0; c < d; c += LANES) {
    const Ints kept = Ints(load(levels.most + c) > 0.0f);
    squares += kept ? load(y + c) * load(y + c) : Floats{};
    stored += kept ? splat(1.0f) : Floats{};
  }
  const float rms = __builtin_sqrtf(sum(squares) / sum(stored));
  float least = __builtin_inff(), best = 0;
  for (const float factor : FACTORS) {
    const Floats scale = positive_half(splat(rms * factor));
    Floats errors{};
    for (int64_t c = 0; c < d; c += LANES) {
      const Floats step = load(levels.step + c), most = load(levels.most + c), v = load(y + c);
      const Floats e = (searched_code(v, scale, step, most) - most / 2.0f) * step * scale - v;
      errors += e * e * load(levels.weight + c);
    }
    const float error = sum(errors);
    if (error < least) {
      least = error;
      best = scale[0];
    }
  }
  for (int64_t c = 0; c < d; c += LANES) {
    const Ints code = to_ints(searched_code(load(y + c), splat(best), load(levels.step + c), load(levels.most + c)));
    std::memcpy(codes + c, &code, sizeof code);
  }
  return best;
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

// Packs complete slabs of 32 tokens (vllm_kvq/formats/qjl.py, values.py): one block per slab and KV head.
//
//   k_bits = sign(S k_in), k_norm = |k_in|, ko_bits = sign(S' k_out), ko_norm = |k_out|
//   v: zero = min, scale = (max - min) / 3, code = round((x - zero) / scale)     per token and group of 32 channels
//
// A page out of range is skipped and a row out of range read as zeros: both are decided here.
#pragma once

#include "read.h"

namespace kvq {

template <int D>
struct Pack {
  using S = Slab<D>;
  static constexpr int THREADS = 256, STRIDE = 36;  // floats per channel of the tile: 32 tokens, 16-byte aligned
  static constexpr int TILE = D * STRIDE * 4;
  static constexpr int OUTER_AT = TILE, MASKS_AT = OUTER_AT + S::N * STRIDE * 4, SUMS_AT = MASKS_AT + (S::M + S::MO) * 4;
  static constexpr int PARTS_AT = SUMS_AT + D * 4, INDEX_AT = PARTS_AT + 9 * 32 * 4, TAKEN_AT = INDEX_AT + S::N * 4;
  static constexpr int SCALES_AT = TAKEN_AT + D * 4;
  static constexpr int SHARED = SCALES_AT + 2 * S::GROUPS * 32 * 4;

  KVQ_DEV static void load_tile(char* memory, const void* x, Type type, const PackParams& p, int unit, int head,
                                int64_t head_stride, int64_t token_stride, int64_t in_ring) {
    for (int i = thread_index(); i < 32 * D; i += THREADS) {
      const int t = i / D, c = i % D;
      const int64_t row = load(p.rows + int64_t(unit) * 32 + t), element = -1 - row + in_ring + head * D + c;
      float value = 0.0f;
      if (row >= 0 && row < p.tokens) value = load_clean(x, type, row * token_stride + head * head_stride + c);
      if (row < 0 && element < p.ring_elements) value = load_clean(p.ring, p.key_type, element);
      to_shared(memory + (c * STRIDE + t) * 4, value);
    }
  }

  // Signs of 32 tokens against one row of a sketch, as bits; `x` is [columns][STRIDE].
  KVQ_DEV static uint32_t signs(const char* x, const float* sketch, int columns, int stride) {
    float sum[32];
    KVQ_UNROLL for (int t = 0; t < 32; ++t) sum[t] = 0.0f;
    KVQ_ROLLED for (int c = 0; c < columns; ++c) {
      const float s = load(sketch + c * stride);
      KVQ_UNROLL for (int t = 0; t < 32; t += 4) {
        const Float4 k = from_shared<Float4>(x + (c * STRIDE + t) * 4);
        sum[t] = fused(s, k.x, sum[t]);
        sum[t + 1] = fused(s, k.y, sum[t + 1]);
        sum[t + 2] = fused(s, k.z, sum[t + 2]);
        sum[t + 3] = fused(s, k.w, sum[t + 3]);
      }
    }
    uint32_t mask = 0;
    KVQ_UNROLL for (int t = 0; t < 32; ++t) mask |= uint32_t(sum[t] >= 0.0f) << t;
    return mask;
  }

  // Word i of a field of sign bits: quad i / 32, token i % 32; byte c, bit p is row p M / 8 + 4 quad + c.
  KVQ_DEV static uint32_t sign_word(const char* masks, int m, int i) {
    uint32_t word = 0;
    KVQ_UNROLL for (int b = 0; b < 32; ++b) {
      const int row = (b & 7) * (m / 8) + 4 * (i / 32) + b / 8;
      word |= (from_shared<uint32_t>(masks + 4 * row) >> (i % 32) & 1) << b;
    }
    return word;
  }

  KVQ_DEV static uint32_t value_code(const char* memory, int c, int t) {
    const char* parameters = memory + SCALES_AT + ((c / 32) * 32 + t) * 8;
    const float scale = from_shared<float>(parameters), zero = from_shared<float>(parameters + 4);
    const float x = nearest(divide(from_shared<float>(memory + (c * STRIDE + t) * 4) - zero, scale));
    return uint32_t(x < 0.0f ? 0.0f : x > 3.0f ? 3.0f : x);
  }

  // The outlier channels: the N of the largest energy, of the prompt where it decides, else of the slab.
  KVQ_DEV static void choose(char* memory, const PackParams& p, int64_t entry) {
    const int thread = thread_index();
    const float* state = p.state ? p.state + entry * 2 * D : nullptr;
    const bool decided = state && load(state + D) >= float(SLAB);
    float mine = 0.0f;
    if (thread < D) {
      if (decided) {
        mine = load(state + thread);
      } else {
        for (int t = 0; t < 32; ++t) {
          const float x = from_shared<float>(memory + (thread * STRIDE + t) * 4);
          mine = fused(x, x, mine);
        }
      }
      to_shared(memory + SUMS_AT + 4 * thread, mine);
    }
    sync_block();
    bool taken = false;
    if (thread < D) {
      int above = 0;
      for (int c = 0; c < D; ++c) {
        const float x = from_shared<float>(memory + SUMS_AT + 4 * c);
        above += x > mine || (x == mine && c < thread);
      }
      taken = above < S::N;
      to_shared(memory + TAKEN_AT + 4 * thread, int(taken));
    }
    sync_block();
    if (taken) {
      int place = 0;
      for (int c = 0; c < thread; ++c) place += from_shared<int>(memory + TAKEN_AT + 4 * c);
      to_shared(memory + INDEX_AT + 4 * place, thread);
    }
    sync_block();
  }

  // Norms of 32 tokens over `columns` of x: eight threads per token, then one.
  KVQ_DEV static void store_norms(char* memory, const char* x, int columns, uint8_t* target) {
    const int thread = thread_index(), t = thread & 31;
    float sum = 0.0f;
    for (int c = thread / 32; c < columns; c += 8) {
      const float k = from_shared<float>(x + (c * STRIDE + t) * 4);
      sum = fused(k, k, sum);
    }
    to_shared(memory + PARTS_AT + 4 * thread, sum);
    sync_block();
    if (thread < 32) {
      float total = 0.0f;
      for (int i = 0; i < 8; ++i) total += from_shared<float>(memory + PARTS_AT + 4 * (i * 32 + t));
      const float norm = square_root(total);
      store(reinterpret_cast<uint16_t*>(target) + t, float_to_half(norm < 65504.0f ? norm : 65504.0f));
    }
    sync_block();
  }

  KVQ_DEV static void run(const PackParams& p) {
    const int unit = block_x(), head = block_y(), thread = thread_index();
    const int64_t page = load(p.page + unit), slab = load(p.slab + unit);
    if (page < 0 || page >= p.count || slab < 0 || slab >= p.slabs) return;
    uint8_t* record = p.pages + page * p.page_stride + head * p.head_stride;
    uint8_t* out = record + p.slabs_at + slab * S::BYTES;
    char* memory = shared_memory();
    const int64_t entry = int64_t(unit) * p.heads + head;

    load_tile(memory, p.key, p.key_type, p, unit, head, p.key_head, p.key_token, 0);
    sync_block();
    choose(memory, p, entry);
    for (int i = thread; i < S::N * 32; i += THREADS) {  // the outliers move out of the tile
      char* from = memory + (from_shared<int>(memory + INDEX_AT + 4 * (i / 32)) * STRIDE + i % 32) * 4;
      to_shared(memory + OUTER_AT + ((i / 32) * STRIDE + i % 32) * 4, from_shared<float>(from));
      to_shared(from, 0.0f);
    }
    sync_block();
    store_norms(memory, memory, D, out + S::K_NORM);
    store_norms(memory, memory + OUTER_AT, S::N, out + S::KO_NORM);
    for (int i = thread; i < S::M; i += THREADS)
      to_shared(memory + MASKS_AT + 4 * i, signs(memory, p.sketches.inner + i, D, S::M));
    for (int i = thread; i < S::MO; i += THREADS)
      to_shared(memory + MASKS_AT + 4 * (S::M + i), signs(memory + OUTER_AT, p.sketches.outer + i, S::N, S::MO));
    sync_block();
    for (int i = thread; i < S::M; i += THREADS)
      store(reinterpret_cast<uint32_t*>(out + S::K_BITS) + i, sign_word(memory + MASKS_AT, S::M, i));
    for (int i = thread; i < S::MO; i += THREADS)
      store(reinterpret_cast<uint32_t*>(out + S::KO_BITS) + i, sign_word(memory + MASKS_AT + 4 * S::M, S::MO, i));
    if (thread < 16) {
      uint32_t word = 0;
      for (int i = 0; i < 4; ++i)
        if (thread < S::INDEX_WORDS) word |= uint32_t(from_shared<int>(memory + INDEX_AT + 16 * thread + 4 * i)) << (8 * i);
      store(reinterpret_cast<uint32_t*>(out + S::KO_INDEX) + thread, word);
    }
    sync_block();

    load_tile(memory, p.value, p.value_type, p, unit, head, p.value_head, p.value_token, p.ring_value);
    sync_block();
    for (int i = thread; i < S::GROUPS * 32; i += THREADS) {
      const int t = i % 32;
      float low = LIMIT, high = -LIMIT;
      for (int c = i / 32 * 32; c < i / 32 * 32 + 32; ++c) {
        const float x = from_shared<float>(memory + (c * STRIDE + t) * 4);
        low = x < low ? x : low;
        high = x > high ? x : high;
      }
      const uint16_t scale = float_to_half(divide(high - low, 3.0f)), zero = float_to_half(low);
      const uint16_t positive = scale ? scale : 1;  // 2^-24
      store(reinterpret_cast<uint16_t*>(out + S::V_SCALE) + i, positive);
      store(reinterpret_cast<uint16_t*>(out + S::V_ZERO) + i, zero);
      to_shared(memory + SCALES_AT + 8 * i, half_to_float(positive));
      to_shared(memory + SCALES_AT + 8 * i + 4, half_to_float(zero));
    }
    sync_block();
    for (int i = thread; i < 2 * D; i += THREADS) {  // word: 4 tokens of one channel of each of 4 planes
      const int quad = i / (D / 4), c = i % (D / 4);
      uint32_t word = 0;
      KVQ_UNROLL for (int b = 0; b < 16; ++b)
        word |= value_code(memory, (b & 3) * (D / 4) + c, 4 * quad + b / 4) << (8 * (b / 4) + 2 * (b & 3));
      store(reinterpret_cast<uint32_t*>(out + S::V_CODES) + i, word);
    }
    if (thread == 0) {
      store(reinterpret_cast<uint32_t*>(record), MAGIC);
      store(record + FLAGS_AT + slab, uint8_t(1));
    }
  }
};

template <int D>
KVQ_GLOBAL(256, 1) pack_kernel(const PackParams p) {
  Pack<D>::run(p);
}

}  // namespace kvq

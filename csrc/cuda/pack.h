// Packs the slabs of 32 tokens that a step completes (vllm_kvq/formats/methods/qjl.py, values.py): one block per slab and KV head.
//
//   k_bits = sign(S k_in), k_norm = |k_in|, ko_bits = sign(S' k_out), ko_norm = |k_out|
//   v: zero = min, scale = (max - min) / 3, code = round((x - zero) / scale)     per token and group of 32 channels
//
// Decides here what triton_kernels/packing/kernel.py decides for other formats: which slabs end in
// (context, context + count], that a prefix hit's pages are not touched, that block 0 and blocks out of range belong to
// no request, and whether a token lies in the ring or among the step's own.
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
  static constexpr int SOURCES_AT = SCALES_AT + 2 * S::GROUPS * 32 * 4;
  static constexpr int SHARED = SOURCES_AT + 32 * 8;
  static constexpr int64_t NOWHERE = INT64_MIN;

  // Where a request's slot begins in the sidecar's pool, in bytes; -1 if its block belongs to no request.
  KVQ_DEV static int64_t slot_at(const PackParams& p, int request, int slot) {
    const Sidecar& s = p.side;
    const int64_t block = load_index(s.table, s.wide_table, request * s.row + slot / s.slots_per_block);
    if (block <= 0 || block >= s.blocks) return -1;
    return block * s.block_bytes + int64_t(slot % s.slots_per_block) * (2 * p.heads * D * bytes_of(p.type));
  }

  // Number `index` of a request's state; 0 if it is nowhere.
  KVQ_DEV static float state_at(const PackParams& p, int request, int index) {
    const int words = 2 * p.heads * D * bytes_of(p.type) / 4;
    const int64_t at = slot_at(p, request, p.side.state_at + index / words);
    return at < 0 ? 0.0f : load(reinterpret_cast<const float*>(p.side.data + at) + index % words);
  }

  // For each of the slab's 32 tokens: its row among the step's own, or -1 - its slot's bytes in the sidecar.
  KVQ_DEV static void find(char* memory, const PackParams& p, int request, int first_position, int context, int first) {
    const int t = thread_index();
    if (t >= 32) return;
    const int position = first_position + t;
    int64_t source = int64_t(first) + position - context;
    if (position < context) {
      const int64_t slot = slot_at(p, request, p.side.ring_at + position % p.side.ring);
      source = slot < 0 ? NOWHERE : -1 - slot;
    }
    to_shared(memory + SOURCES_AT + 8 * t, source);
  }

  // Keys (`second` 0) or values (1) of the slab; what is not finite is replaced and counted.
  KVQ_DEV static void load_tile(char* memory, const void* x, const PackParams& p, int head, int64_t head_stride,
                                int64_t token_stride, int second) {
    int bad = 0;
    for (int i = thread_index(); i < 32 * D; i += THREADS) {
      const int t = i / D, c = i % D;
      const int64_t source = from_shared<int64_t>(memory + SOURCES_AT + 8 * t);
      float value = 0.0f;
      if (source >= 0 && source < p.tokens)
        value = load_float(x, p.type, source * token_stride + head * head_stride + c);
      if (source < 0 && source != NOWHERE)
        value = load_float(p.side.data + (-1 - source), p.type, (int64_t(second) * p.heads + head) * D + c);
      const float kept = clean(value);
      bad += kept != value;  // also if it is NaN
      to_shared(memory + (c * STRIDE + t) * 4, kept);
    }
    if (bad) add_atomically(p.faults + 1, bad);
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
  KVQ_DEV static void choose(char* memory, const PackParams& p, int request, int head) {
    const int thread = thread_index();
    const bool decided = p.has_state && state_at(p, request, (2 * head + 1) * D) >= float(SLAB);
    float mine = 0.0f;
    if (thread < D) {
      if (decided) {
        mine = state_at(p, request, 2 * head * D + thread);
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
    const int request = block_x() / p.units, head = block_y(), thread = thread_index();
    const int32_t* plan = p.plan + request;
    const int first = load(plan + FIRST * p.requests), count = load(plan + COUNT * p.requests);
    const int context = load(plan + CONTEXT * p.requests);
    const int unit = context / SLAB + block_x() % p.units, place = unit / p.slabs, slab = unit % p.slabs;
    if (count <= 0 || (unit + 1) * SLAB > context + count || place >= p.table_width) return;
    const int64_t page = load_index(p.table, p.wide_table, request * p.table_row + place);
    if (page <= 0 || page >= p.count) return;
    uint8_t* record = p.pages + page * p.page_stride + head * p.head_stride;
    uint8_t* out = record + p.slabs_at + slab * S::BYTES;
    char* memory = shared_memory();

    find(memory, p, request, unit * SLAB, context, first);
    sync_block();
    load_tile(memory, p.key, p, head, p.key_head, p.key_token, 0);
    sync_block();
    choose(memory, p, request, head);
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

    load_tile(memory, p.value, p, head, p.value_head, p.value_token, 1);
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
      store(reinterpret_cast<uint32_t*>(record), uint32_t(PAGE_MAGIC));
      store(record + FLAGS_AT + slab, uint8_t(1));
    }
  }
};

template <int D>
KVQ_GLOBAL(256, 1) pack_kernel(const PackParams p) {
  Pack<D>::run(p);
}

}  // namespace kvq

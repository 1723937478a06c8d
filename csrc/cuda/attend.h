// Attention over packed QJL keys and 2-bit per-token values: one block per request, KV head, tile of rows and split.
//
//   v_t   = |k_in|_t (bits_t . h + half) + |k_out|_t (bits'_t . h' + half')      (operand.h)
//   s_t   = unit v_t                                                            in base-2 logarithms
//   o_c   = sum_t w_t (zero_tg + scale_tg code_tc),  w_t = 2^(s_t - max)
//
// The warps of a block take the slabs of its split in turn, each with its own buffers, softmax and accumulators, and meet
// only at the end. A slab is copied while the one before it is attended. Ids that are no page are never followed; slabs
// without a flag are copied but not seen.
#pragma once

#include "operand.h"
#include "slab.h"

namespace kvq {

constexpr int warps_for(int d) { return d == 256 ? 2 : 4; }

template <int D, int TILES>
struct Attend {
  using S = Slab<D>;
  static constexpr int WARPS = warps_for(D), ROWS = 8 * TILES;
  static constexpr int STAGE = HEADER_BYTES + S::BYTES;
  static constexpr int WARP_BYTES = 2 * STAGE + TILES * S::OPERAND_BYTES;
  static constexpr int SHARED = WARPS * WARP_BYTES;
  static constexpr int WORDS = D / 32, PLANES = 4;

  static_assert(WARP_BYTES >= ROWS * (D + 2) * 4, "the result of a warp takes the place of its buffers");

  struct State {
    float best[TILES][2];
    float acc[TILES][PLANES][WORDS / 2][4];  // channels (word 2 j, 2 j + 1) x rows (2 t, 2 t + 1)
    float zero[TILES][4];                    // [0, 1]: group g's sum of zeros; [2, 3]: the sum of weights
  };

  // Weights of a slab's 32 tokens, and from them all sums over values.
  KVQ_DEV static void values(State& s, const float (&weight)[TILES][4][2], const char* slab) {
    const int g = lane() >> 2, t = lane() & 3;
    Pair w[TILES][2];  // [token quad t or t + 4]: tokens (0, 2) and (1, 3)
    KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile) {
      uint32_t x[4];
      KVQ_UNROLL for (int r = 0; r < 4; ++r) x[r] = transpose(pack_halves(weight[tile][r][0], weight[tile][r][1]));
      w[tile][0] = {permute<0x5410>(x[0], x[2]), permute<0x5410>(x[1], x[3])};
      w[tile][1] = {permute<0x7632>(x[0], x[2]), permute<0x7632>(x[1], x[3])};
    }
    KVQ_UNROLL for (int k = 0; k < 2; ++k) {
      const int quad = t + 4 * k;
      Pair zero{0, 0};
      if (g < S::GROUPS) zero = unzip(from_shared<Pair>(byte_of(slab, S::V_ZERO + 64 * g + 8 * quad)));
      const uint32_t ones = 0x3C003C00u, a[4] = {zero.x, ones, zero.y, ones};
      KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile) multiply(s.zero[tile], a, w[tile][k].x, w[tile][k].y);

      uint32_t words[WORDS];
      value_words<D>(words, slab, quad);
      KVQ_UNROLL for (int group = 0; group < S::GROUPS; ++group) {
        const Pair scale = unzip(from_shared<Pair>(byte_of(slab, S::V_SCALE + 64 * group + 8 * quad)));
        KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile) {
          const uint32_t b0 = multiply_halves(w[tile][k].x, scale.x), b1 = multiply_halves(w[tile][k].y, scale.y);
          KVQ_UNROLL for (int plane = 0; plane < PLANES; ++plane) {
            KVQ_UNROLL for (int j = 0; j < WORDS / 2; ++j) {
              if (ValueWords<D>::group(plane, 2 * j) != group) continue;
              const uint32_t x = words[2 * j], y = words[2 * j + 1];
              const uint32_t codes[4] = {even_bytes(x, 2 * plane, 3), even_bytes(y, 2 * plane, 3),
                                         even_bytes(x >> 8, 2 * plane, 3), even_bytes(y >> 8, 2 * plane, 3)};
              multiply(s.acc[tile][plane][j], codes, b0, b1);
            }
          }
        }
      }
    }
  }

  // The slab's part of the softmax: tokens [from, to) of it are seen.
  KVQ_DEV static void attend(State& s, const char* slab, const char* operand, const float (&inner)[TILES][4],
                             const float (&outer)[TILES][4], const float (&unit)[TILES][2], int from, int to) {
    const int quad = quad_of(lane() >> 2);
    float v[TILES][4][2];
    {
      float acc[TILES][2][4];
      KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile)
        KVQ_UNROLL for (int i = 0; i < 8; ++i) acc[tile][i / 4][i % 4] = inner[tile][i % 4];
      sign_products<D, TILES, false>(acc, slab, operand);
      const Pair norm = from_shared<Pair>(byte_of(slab, S::K_NORM + 8 * quad));
      const uint32_t n[4] = {norm.x & 0xFFFF, norm.x >> 16, norm.y & 0xFFFF, norm.y >> 16};
      KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile)
        KVQ_UNROLL for (int r = 0; r < 4; ++r)
          KVQ_UNROLL for (int i = 0; i < 2; ++i)
            v[tile][r][i] = half_to_float(uint16_t(n[r])) * acc[tile][r / 2][2 * (r % 2) + i];
    }
    {
      float acc[TILES][2][4];
      KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile)
        KVQ_UNROLL for (int i = 0; i < 8; ++i) acc[tile][i / 4][i % 4] = outer[tile][i % 4];
      sign_products<D, TILES, true>(acc, slab, operand);
      const Pair norm = from_shared<Pair>(byte_of(slab, S::KO_NORM + 8 * quad));
      const uint32_t n[4] = {norm.x & 0xFFFF, norm.x >> 16, norm.y & 0xFFFF, norm.y >> 16};
      KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile)
        KVQ_UNROLL for (int r = 0; r < 4; ++r)
          KVQ_UNROLL for (int i = 0; i < 2; ++i)
            v[tile][r][i] = fused(half_to_float(uint16_t(n[r])), acc[tile][r / 2][2 * (r % 2) + i], v[tile][r][i]);
    }
    if (from > 0 || to < SLAB) {
      KVQ_UNROLL for (int r = 0; r < 4; ++r) {
        const int token = 4 * quad + r;
        if (token < from || token >= to)
          KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile) v[tile][r][0] = v[tile][r][1] = bits_to_float(MINUS_INFINITY);
      }
    }
    float top[TILES][2];
    bool higher = false;
    KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile)
      KVQ_UNROLL for (int i = 0; i < 2; ++i) {
        const float x = larger(larger(v[tile][0][i], v[tile][1][i]), larger(v[tile][2][i], v[tile][3][i])) * unit[tile][i];
        top[tile][i] = larger(s.best[tile][i], x);
        higher |= x > s.best[tile][i];
      }
    if (any(higher)) {  // rare after the first slabs
      KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile) {
        float decay[2];
        KVQ_UNROLL for (int i = 0; i < 2; ++i) {
          float x = top[tile][i];
          x = larger(x, shuffle_xor(x, 4));
          x = larger(x, shuffle_xor(x, 8));
          x = larger(x, shuffle_xor(x, 16));
          decay[i] = exp2_fast(s.best[tile][i] - x);
          s.best[tile][i] = x;
        }
        KVQ_UNROLL for (int k = 0; k < PLANES * (WORDS / 2); ++k)
          KVQ_UNROLL for (int i = 0; i < 4; ++i) s.acc[tile][k / (WORDS / 2)][k % (WORDS / 2)][i] *= decay[i % 2];
        KVQ_UNROLL for (int i = 0; i < 4; ++i) s.zero[tile][i] *= decay[i % 2];
      }
    }
    KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile)
      KVQ_UNROLL for (int r = 0; r < 4; ++r)
        KVQ_UNROLL for (int i = 0; i < 2; ++i)
          v[tile][r][i] = exp2_fast(fused(v[tile][r][i], unit[tile][i], -s.best[tile][i]));
    values(s, v, slab);
  }

  // Does not normalise: leaves best, sum of weights and sums of values in shared memory.
  KVQ_DEV static void leave(State& s, char* place) {
    const int g = lane() >> 2, t = lane() & 3;
    float* out = reinterpret_cast<float*>(place);  // [ROWS][D], then best, then total
    KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile)
      KVQ_UNROLL for (int i = 0; i < 2; ++i) {
        const int row = 8 * tile + 2 * t + i;
        KVQ_UNROLL for (int group = 0; group < S::GROUPS; ++group) {
          const float shift = shuffle(s.zero[tile][i], 4 * group + t);
          KVQ_UNROLL for (int plane = 0; plane < PLANES; ++plane)
            KVQ_UNROLL for (int word = 0; word < WORDS; ++word) {
              if (ValueWords<D>::group(plane, word) != group) continue;
              const float lift = 16777216.0f / float(1 << (2 * plane));
              const int channel = plane * (D / 4) + ValueWords<D>::channel(g, word);
              to_shared(out + row * D + channel, s.acc[tile][plane][word / 2][2 * (word % 2) + i] * lift + shift);
            }
        }
        if (g == 0) {
          to_shared(out + ROWS * D + row, s.best[tile][i]);
          to_shared(out + ROWS * (D + 1) + row, s.zero[tile][2 + i]);
        }
      }
  }

  KVQ_DEV static void store_block(const AttendParams& p, int request, int tile, int head, int split) {
    const char* memory = shared_memory();
    const int64_t all = p.rows.tokens * p.rows.heads * p.rows.share;
    for (int i = thread_index(); i < ROWS * D; i += WARPS * 32) {
      const int r = i / D, c = i % D, row = tile * ROWS + r;
      const int64_t token = token_of(p.rows, request, row);
      if (token < 0) break;  // rows rise with i
      float best = LOWEST, total = 0.0f, sum = 0.0f;
      KVQ_UNROLL for (int w = 0; w < WARPS; ++w)
        best = larger(best, from_shared<float>(memory + w * WARP_BYTES + 4 * (ROWS * D + r)));
      KVQ_UNROLL for (int w = 0; w < WARPS; ++w) {
        const char* one = memory + w * WARP_BYTES;
        const float weight = exp2_fast(from_shared<float>(one + 4 * (ROWS * D + r)) - best);
        total = fused(weight, from_shared<float>(one + 4 * (ROWS * (D + 1) + r)), total);
        sum = fused(weight, from_shared<float>(one + 4 * i), sum);
      }
      const int64_t whole = (token * p.rows.heads + head) * p.rows.share + row % p.rows.share;
      const int64_t place = split * all + whole;
      store(p.out + place * D + c, total > 0.0f ? sum / total : 0.0f);
      if (c == 0) store(p.lse + place, total > 0.0f ? (best + log2_of(total)) * LN2 : bits_to_float(MINUS_INFINITY));
    }
  }

  KVQ_DEV static void run(const AttendParams& p) {
    const int program = block_x(), split = block_y();
    const int head = program % p.rows.heads, tile = program / p.rows.heads % p.rows.tiles;
    const int request = program / p.rows.heads / p.rows.tiles;
    char* mine = shared_memory() + warp_index() * WARP_BYTES;
    char* operand = mine + 2 * STAGE;

    const Span span = span_of(p.table, p.pages, request);
    const int first = span.low / SLAB, last = (span.high + SLAB - 1) / SLAB;
    const int each = last > first ? (last - first + p.splits - 1) / p.splits : 0;
    const int end = first + (split + 1) * each < last ? first + (split + 1) * each : last;
    int slab = first + split * each + warp_index();

    State s;
    KVQ_UNROLL for (int tile_ = 0; tile_ < TILES; ++tile_) {
      KVQ_UNROLL for (int i = 0; i < 2; ++i) s.best[tile_][i] = LOWEST;
      KVQ_UNROLL for (int i = 0; i < 4; ++i) s.zero[tile_][i] = 0.0f;
      KVQ_UNROLL for (int k = 0; k < PLANES * (WORDS / 2); ++k)
        KVQ_UNROLL for (int i = 0; i < 4; ++i) s.acc[tile_][k / (WORDS / 2)][k % (WORDS / 2)][i] = 0.0f;
    }
    if (slab < end) {
      const int64_t row = int64_t(program) * ROWS;
      float unit[TILES][2], inner[TILES][4], outer[TILES][4];
      uint32_t index[S::INDEX_WORDS];
      KVQ_UNROLL for (int i = 0; i < TILES * 2; ++i)
        unit[i / 2][i % 2] = load(p.unit + row + 8 * (i / 2) + 2 * (lane() & 3) + i % 2);
      KVQ_UNROLL for (int i = 0; i < S::INDEX_WORDS; ++i) index[i] = load(p.index + program * 4 + i);

      // fetches the slab if its page can be read; whether it could
      auto fetch = [&](int which, int buffer) {
        bool good = false;
        if (which < end) {
          const Place at = place_of(p.pages, which);
          const uint8_t* record = record_of(p.table, p.pages, request, at.page, head);
          good = record != nullptr;
          char* to = mine + buffer * STAGE;
          if (good) copy_slab<D>(to + S::BYTES, to, record, p.pages.slabs_at + at.slab * S::BYTES);
        }
        copy_commit();
        return good;
      };
      bool good = fetch(slab, 0);
      for (int i = lane() * 16; i < TILES * S::OPERAND_BYTES; i += 512)
        to_shared(operand + i,
                  load(reinterpret_cast<const Quad*>(p.operand + int64_t(program) * TILES * S::OPERAND_BYTES + i)));
      sync_warp();
      offset_products<D, TILES, false>(inner, operand);
      offset_products<D, TILES, true>(outer, operand);

      KVQ_ROLLED for (int buffer = 0; slab < end; slab += WARPS, buffer ^= 1) {
        const bool next = fetch(slab + WARPS, buffer ^ 1);
        copy_wait<1>();
        sync_warp();
        const char* data = mine + buffer * STAGE;
        const Place at = place_of(p.pages, slab);
        int from = span.low - slab * SLAB, to = span.high - slab * SLAB;
        if (p.table.listed) {
          const int64_t entry = request * p.table.row + at.page;
          from = clamp_int(load_index(p.table.low, p.table.wide_limits, entry), 0, 1 << 20) - at.slab * SLAB;
          to = clamp_int(load_index(p.table.high, p.table.wide_limits, entry), 0, 1 << 20) - at.slab * SLAB;
        }
        const bool seen = from < SLAB && to > 0 && from < to;
        if (good && seen && from_shared<uint32_t>(data + S::BYTES) == PAGE_MAGIC &&
            from_shared<uint8_t>(data + S::BYTES + FLAGS_AT + at.slab) == 1) {
          bool same = true;
          KVQ_UNROLL for (int i = 0; i < S::INDEX_WORDS; ++i) {
            const uint32_t word = from_shared<uint32_t>(byte_of(data, S::KO_INDEX + 4 * i));
            same &= word == index[i];
            index[i] = word;
          }
          if (!same) {  // different outlier channels from the previous slab's
            Outliers<D> outliers;
            outliers.read(index);
            build_operand<D, TILES>(operand, p, program, outliers);
            sync_warp();
            offset_products<D, TILES, false>(inner, operand);
            offset_products<D, TILES, true>(outer, operand);
          }
          attend(s, data, operand, inner, outer, unit, from, to);
        }
        sync_warp();  // before this buffer is overwritten
        good = next;
      }
      copy_wait<0>();
      sync_warp();
    }
    leave(s, mine);
    sync_block();
    store_block(p, request, tile, head, split);
  }
};

template <int D, int TILES>
KVQ_GLOBAL(32 * warps_for(D), TILES == 1 ? 3 : 1) attend_kernel(const AttendParams p) {
  Attend<D, TILES>::run(p);
}

}  // namespace kvq

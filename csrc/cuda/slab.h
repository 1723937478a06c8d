// One slab in shared memory: where its 16-byte chunks lie there, and its sign and value codes as matrix operands.
//
// Chunk i lies at i ^ ((i >> 3) & 3). With the token quads and channels that a lane takes (QUAD below) eight lanes that
// read 16 bytes at once then hit all 32 banks, for keys and for values (d = 256: two at a time for values).
//
// Keys:    the codes are the A operand (16 tokens x 16 sketch rows), the sketched queries B: a word (4 sketch rows of one
//          token) masked by one plane is two registers of A. A lane (g, t) holds tokens 4 QUAD(g) .. + 3.
// Values:  the codes are A (16 channels x 16 tokens), the softmax weights B: a word holds 4 tokens of one channel. A lane
//          holds token quads t and t + 4, and D / 32 channels of every plane.
// The tokens of rows (2t, 2t + 1) of a score matrix are those of quads t and t + 4, so one 8 x 8 transposition turns
// scores into weights where they are needed.
#pragma once

#include "read.h"

namespace kvq {

KVQ_DEV constexpr int swizzled(int chunk) { return chunk ^ ((chunk >> 3) & 3); }
KVQ_DEV int quad_of(int g) { return (g >> 1) | ((g & 1) << 2); }

// Byte `offset` of the slab, in shared memory.
KVQ_DEV const char* byte_of(const char* slab, int offset) {
  return slab + (swizzled(offset >> 4) << 4) + (offset & 15);
}

KVQ_DEV uint32_t even_bytes(uint32_t word, int place, uint32_t mask) { return word & (mask * 0x00010001u << place); }

// Four halves as they lie: (0, 1), (2, 3) -> (0, 2) and (1, 3)
KVQ_DEV Pair unzip(Pair x) { return {permute<0x5410>(x.x, x.y), permute<0x7632>(x.x, x.y)}; }

// The part of a record that a warp copies: header and slab, all lanes together.
template <int D>
KVQ_DEV void copy_slab(char* header, char* slab, const uint8_t* record, int slab_at) {
  constexpr int CHUNKS = Slab<D>::BYTES / 16, HEADER_CHUNKS = HEADER_BYTES / 16;
  const int l = lane();
  const uint8_t* from = record + slab_at + l * 16;
  char* to = slab + swizzled(l) * 16;  // 32 chunks further the pattern is the same
  KVQ_UNROLL for (int i = 0; i < (CHUNKS + 31) / 32; ++i)
    if (i * 32 + 32 <= CHUNKS || l < CHUNKS - i * 32) copy_async(to + i * 512, from + i * 512);
  constexpr int LAST = CHUNKS % 32;
  // the header is copied by lanes that the last round leaves idle
  if (l >= 32 - HEADER_CHUNKS && LAST <= 32 - HEADER_CHUNKS)
    copy_async(header + (l - 32 + HEADER_CHUNKS) * 16, record + (l - 32 + HEADER_CHUNKS) * 16);
  if (LAST > 32 - HEADER_CHUNKS && l < HEADER_CHUNKS) copy_async(header + l * 16, record + l * 16);
}

// acc += bits (32 tokens x rows of `STEPS` steps) operand; acc[tile][r / 2][2 (r % 2) + q]: token r of the lane's quad.
template <int D, int TILES, bool OUTER>
KVQ_DEV void sign_products(float (&acc)[TILES][2][4], const char* slab, const char* operand) {
  using S = Slab<D>;
  constexpr int M = OUTER ? S::MO : S::M, FIELD = OUTER ? S::KO_BITS : S::K_BITS;
  constexpr int STEPS = M / 16, FIRST = OUTER ? S::INNER_STEPS : 0, PLANES = M >= 128 ? 8 : 4;
  const int t = lane() & 3, chunk = quad_of(lane() >> 2);
  KVQ_UNROLL for (int group = 0; group < STEPS / PLANES; ++group) {
    const int quad = M >= 128 ? 4 * group + t : (t & 1);
    Quad words = from_shared<Quad>(byte_of(slab, FIELD + quad * 128 + chunk * 16));
    if (M < 128) {
      const int shift = 4 * (t >> 1);
      words = Quad{words.x >> shift, words.y >> shift, words.z >> shift, words.w >> shift};
    }
    const uint32_t even[4] = {words.x, words.y, words.z, words.w};
    const uint32_t odd[4] = {words.x >> 8, words.y >> 8, words.z >> 8, words.w >> 8};
    KVQ_UNROLL for (int place = 0; place < PLANES; place += 2) {
      const int step = FIRST + group * PLANES + place;
      KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile) {
        const Quad b = from_shared<Quad>(operand + tile * S::OPERAND_BYTES + (step >> 1) * 512 + lane() * 16);
        KVQ_UNROLL for (int pair = 0; pair < 2; ++pair) {
          KVQ_UNROLL for (int k = 0; k < 2; ++k) {
            const uint32_t a[4] = {
                even_bytes(even[2 * pair], place + k, 1), even_bytes(even[2 * pair + 1], place + k, 1),
                even_bytes(odd[2 * pair], place + k, 1), even_bytes(odd[2 * pair + 1], place + k, 1)};
            multiply(acc[tile][pair], a, k ? b.z : b.x, k ? b.w : b.y);
          }
        }
      }
    }
  }
}

// The same products with all bits set: the offset of the scores of a zero vector, in the same units.
template <int D, int TILES, bool OUTER>
KVQ_DEV void offset_products(float (&acc)[TILES][4], const char* operand) {
  using S = Slab<D>;
  constexpr int M = OUTER ? S::MO : S::M;
  constexpr int STEPS = M / 16, FIRST = OUTER ? S::INNER_STEPS : 0, PLANES = M >= 128 ? 8 : 4;
  KVQ_UNROLL for (int tile = 0; tile < TILES; ++tile) {
    KVQ_UNROLL for (int i = 0; i < 4; ++i) acc[tile][i] = 0.0f;
    KVQ_ROLLED for (int step = FIRST; step < FIRST + STEPS; step += 2) {
      const Quad b = from_shared<Quad>(operand + tile * S::OPERAND_BYTES + (step >> 1) * 512 + lane() * 16);
      const uint32_t first = 0x00010001u << (step % PLANES), second = first << 1;
      const uint32_t one[4] = {first, first, first, first}, two[4] = {second, second, second, second};
      multiply(acc[tile], one, b.x, b.y);
      multiply(acc[tile], two, b.z, b.w);
    }
    KVQ_UNROLL for (int i = 0; i < 4; ++i) acc[tile][i] *= -0.5f;
  }
}

// Channels of a plane that a lane takes: word i is channel `channel_word(i)`.
template <int D>
struct ValueWords {
  static constexpr int COUNT = D / 32, PLANE = D / 4;
  KVQ_DEV static int channel(int g, int i) {
    return COUNT <= 4 ? COUNT * quad_of(g) + i : 32 * (i >> 2) + 4 * quad_of(g) + (i & 3);
  }
  // group of 32 channels that word i of a plane lies in
  KVQ_DEV static constexpr int group(int plane, int i) { return D == 64 ? plane >> 1 : D == 128 ? plane : 2 * plane + (i >> 2); }
};

template <int D>
KVQ_DEV void value_words(uint32_t (&words)[D / 32], const char* slab, int token_quad) {
  using S = Slab<D>;
  const int q = quad_of(lane() >> 2), row = S::V_CODES + token_quad * D;
  if (D == 64) {
    const Pair x = from_shared<Pair>(byte_of(slab, row + 8 * q));
    words[0] = x.x;
    words[1] = x.y;
  } else {
    KVQ_UNROLL for (int i = 0; i < D / 32; i += 4) {
      const Quad x = from_shared<Quad>(byte_of(slab, row + 32 * i + 16 * q));
      words[i] = x.x;
      words[i + 1] = x.y;
      words[i + 2] = x.z;
      words[i + 3] = x.w;
    }
  }
}

}  // namespace kvq

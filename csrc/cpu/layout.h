// What the kernels know about a format: the kinds of its codecs, its sizes, and where its fields lie.
//
// Each list below is written once. It generates the enum or the struct, and the names that the library exports, from
// which vllm_kvq/kernels/cpu/layout.py fills a Layout. The meaning of a field's bytes is described at the top of its
// codec's file in vllm_kvq/formats.
#pragma once

#include <cstdint>

namespace kvq {

constexpr int LARGEST_HEAD = 512;  // channels
constexpr int SLAB = 32;        // tokens that are packed together
constexpr int BLOCK_SLABS = 4;  // slabs between two updates of the running softmax
constexpr int BLOCK = BLOCK_SLABS * SLAB;

// NUMBER(name, value): what Python also says, in formats/page.py, formats/parts/{quant,scales,turning}.py and
// kernels/slots.py. The library exports them, and kernels/cpu/layout.py compares.
#define KVQ_NUMBERS(NUMBER)                                             \
  NUMBER(PAGE_MAGIC, 0x3151564B)                                        \
  NUMBER(POSITION_AT, 4)         /* of a page's first token */          \
  NUMBER(FLAGS_AT, 16)           /* a page's flags, one per slab */     \
  NUMBER(SIDE_MAGIC, 0x4B565153)                                        \
  NUMBER(LIMIT, 32768)           /* of what is packed, in magnitude */  \
  NUMBER(SCALE_SHIFT, 7)         /* of a byte, to a float16 */          \
  NUMBER(LARGEST_SCALE, 0xF7)    /* in one byte */                      \
  NUMBER(SCALES_AROUND, 4)       /* a number, that are tried */         \
  NUMBER(FINE, 64)               /* slabs of the tables of turning.h */ \
  NUMBER(COARSE, 512)

#define KVQ_NUMBER(name, value) constexpr int32_t name = value;
KVQ_NUMBERS(KVQ_NUMBER)
#undef KVQ_NUMBER

// KIND(name)
#define KVQ_KEY_KINDS(KIND)        \
  KIND(channel) /* SQuat, KIVI */  \
  KIND(boosted) /* SQuat, Kitty */ \
  KIND(hybrid)  /* InnerQ */       \
  KIND(sketch)  /* QJL */          \
  KIND(polar)   /* PolarQuant */   \
  KIND(transformed) /* klt */      \
  KIND(raw)     /* lossless */

#define KVQ_VALUE_KINDS(KIND)      \
  KIND(token)  /* per token */     \
  KIND(hybrid) /* InnerQ */        \
  KIND(searched) /* klt */         \
  KIND(raw)    /* 16 or 32 bits */

#define KVQ_DTYPES(KIND) KIND(f32) KIND(f16) KIND(bf16)

#define KVQ_ENUMERATOR(name) name,
enum class Keys : int64_t { KVQ_KEY_KINDS(KVQ_ENUMERATOR) };
enum class Values : int64_t { KVQ_VALUE_KINDS(KVQ_ENUMERATOR) };
enum class Dtype : int64_t { KVQ_DTYPES(KVQ_ENUMERATOR) };
#undef KVQ_ENUMERATOR

// FIELD(type, name), 8 bytes each; 0 where a codec has no such thing.
#define KVQ_LAYOUT_FIELDS(FIELD)                                                                            \
  FIELD(int64_t, bytes)        /* of the layout with its tables */                                          \
  FIELD(int64_t, head_size)    /* channels of the model */                                                  \
  FIELD(int64_t, d)            /* channels as stored, a multiple of 32 */                                   \
  FIELD(int64_t, tokens)       /* N */                                                                      \
  FIELD(int64_t, record_bytes)                                                                              \
  FIELD(int64_t, slabs_at)     /* bytes before the first slab */                                            \
  FIELD(int64_t, slab_bytes)                                                                                \
  FIELD(Dtype, raw_dtype)      /* of elements that are stored as they are */                                \
                                                                                                            \
  FIELD(Keys, keys)                                                                                         \
  FIELD(int64_t, key_bits)     /* of a code; polar: of an angle */                                          \
  FIELD(int64_t, key_fitted)   /* scales and zeros of least squares, not of the range */                    \
  FIELD(int64_t, key_mode)     /* InnerQ: 0 the better mode of each group, 1 symmetric, 2 asymmetric */     \
  FIELD(int64_t, boosted)      /* Kitty: channels of a slab with 4 bits */                                  \
  FIELD(int64_t, radius_bits)                                                                               \
  FIELD(int64_t, paper)        /* polar: the paper's grid, whose only parameter is the step of the radii */ \
  FIELD(int64_t, sketch_rows)  /* m */                                                                      \
  FIELD(int64_t, outer_rows)   /* m_out */                                                                  \
  FIELD(int64_t, outliers)     /* n */                                                                      \
  FIELD(double, sketch_scale)  /* c(d) / m */                                                               \
  FIELD(double, outer_scale)   /* c(n) / m_out */                                                           \
  FIELD(int64_t, slots)        /* transformed: codes of 2 bits of a token */                                \
  FIELD(int64_t, key_heads)    /* transformed: KV heads that have constants */                              \
  FIELD(double, lambda)        /* SQuat */                                                                  \
  FIELD(double, noise_floor)   /* SQuat: 1 / lambda is at least this many times the noise */                \
  FIELD(int64_t, squat_block)  /* SQuat: channels that are quantized before the others follow */            \
                                                                                                            \
  FIELD(Values, values)                                                                                     \
  FIELD(int64_t, value_bits)                                                                                \
  FIELD(int64_t, value_fitted) /* as key_fitted */                                                          \
  FIELD(int64_t, value_mode)   /* as key_mode */                                                            \
  FIELD(int64_t, value_rotated) /* by a Hadamard matrix, see pack/kinds/affine.h */                         \
  FIELD(int64_t, group)        /* channels that share the parameters of a token */                          \
  FIELD(double, value_step)    /* searched: between two levels, where the scale is 1 */                     \
                                                                                                            \
  /* fields of the slab, bytes from its start */                                                            \
  FIELD(int64_t, k_codes)                                                                                   \
  FIELD(int64_t, k_high)       /* after k_codes, whose words they continue */                               \
  FIELD(int64_t, k_scale)                                                                                   \
  FIELD(int64_t, k_zero)                                                                                    \
  FIELD(int64_t, k_slot)                                                                                    \
  FIELD(int64_t, k_bits)                                                                                    \
  FIELD(int64_t, k_norm)                                                                                    \
  FIELD(int64_t, ko_bits)                                                                                   \
  FIELD(int64_t, ko_norm)                                                                                   \
  FIELD(int64_t, ko_index)                                                                                  \
  FIELD(int64_t, k_polar)      /* an angle and a radius of 4 bits each */                                   \
  FIELD(int64_t, k_angle)                                                                                   \
  FIELD(int64_t, k_angle_high) /* the third bits, if an angle has three */                                  \
  FIELD(int64_t, k_radius)                                                                                  \
  FIELD(int64_t, k_raw)                                                                                     \
  FIELD(int64_t, v_codes)                                                                                   \
  FIELD(int64_t, v_high)       /* the third bits, if a code has three */                                    \
  FIELD(int64_t, v_scale)                                                                                   \
  FIELD(int64_t, v_zero)                                                                                    \
  FIELD(int64_t, v_slot)                                                                                    \
  FIELD(int64_t, v_raw)                                                                                     \
                                                                                                            \
  /* fields of the page, bytes from its start */                                                            \
  FIELD(int64_t, k_inner_norm)                                                                              \
  FIELD(int64_t, k_angle0)                                                                                  \
  FIELD(int64_t, k_angle_step)                                                                              \
  FIELD(int64_t, k_radius0)                                                                                 \
  FIELD(int64_t, k_radius_step)                                                                             \
                                                                                                            \
  /* tables that belong to a format but to no page, bytes from the start of the layout that they follow */  \
  FIELD(int64_t, sketch)       /* QJL: S transposed, float32 [d][m] */                                      \
  FIELD(int64_t, outer)        /* QJL: S' transposed, float32 [n][m_out] */                                 \
  FIELD(int64_t, pairs)        /* polar, transformed: x and y channels of pairs, int32 [2][d / 2] */        \
  FIELD(int64_t, backward)     /* transformed: T^-1 s step, float32 [heads][d / 32][d][32] */               \
  FIELD(int64_t, forward)      /* transformed: T / s transposed, float32 [heads][d / 32][d][32] */          \
  FIELD(int64_t, channels)     /* transformed: weight, step, largest code, float32 [heads][3][d] */         \
  FIELD(int64_t, mean)         /* transformed: b, which turns, float32 [heads][d] */                        \
  FIELD(int64_t, fine)         /* transformed: e of the first slabs, float32 [FINE][d] */                   \
  FIELD(int64_t, coarse)       /* transformed: by how much more it turns, float32 [COARSE][d] */            \
  FIELD(int64_t, places)       /* transformed: channel and shift of each slot, int32 [heads][2][slots] */

#define KVQ_MEMBER(type, name) type name;
struct Layout {
  KVQ_LAYOUT_FIELDS(KVQ_MEMBER)
};

// The tables, and their scales as the kernels multiply with them.
struct Constants {
  const float *sketch, *outer;
  float sketch_scale, outer_scale;
  const int32_t* pairs;
  const float *backward, *forward, *channels, *mean, *fine, *coarse;
  const int32_t* places;
};

// The numbers that a query is multiplied to before it meets a page, 0 if it is used as it is; of transformed keys the
// channels', then those for a slab's e.
inline int64_t projected(const Layout& l) {
  if (l.keys == Keys::sketch) return l.sketch_rows;
  return l.keys == Keys::transformed ? 2 * l.d : 0;
}

// The constants as a KV head's kernels see them: of transformed keys each head has its own.
inline Constants of_head(Constants c, const Layout& l, int64_t head) {
  if (l.keys != Keys::transformed) return c;
  c.backward += head * l.d * l.d;
  c.forward += head * l.d * l.d;
  c.channels += head * 3 * l.d;
  c.mean += head * l.d;
  c.places += head * 2 * l.slots;
  return c;
}

// Bits of the codes in v_codes.
inline int64_t low_value_bits(const Layout& l) { return l.value_bits == 3 ? 2 : l.value_bits; }

}  // namespace kvq

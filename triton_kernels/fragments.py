"""Operands of the matrix units, made in the lanes that multiply them: nothing goes through shared memory.

The units take a product of 16 x 16 by 16 x 8 from a warp's 32 lanes. Lane 4 g + t holds, of the left operand, columns
2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and g + 8; of the right operand, the same rows of column g; of the product,
columns 2 t and 2 t + 1 of rows g and g + 8. Which index of a sum stands in which column does not matter, as long as
both operands agree, so every lane loads neighbours in memory and uses them at its own places:

    left rows       the R neighbours of g are rows g, g + 8, ...           (32, R): R g + r       fragment_places
    reduced index   a word's four codes belong to indices 4 t .. 4 t + 3   (4 M, 4): 4 t + e      fragment_channels

If the first dimension of a shape is the lanes, Triton loads the data into these lanes and leaves it there.

Codes become matrix operands without any conversion. A b-bit code in the low 10 bits of a 16-bit lane, read as
float16, is the subnormal number

    code * 2^(shift - 24)

which the matrix units multiply exactly. So one `and` turns two codes into two operands, plane p stays where it is
(shift = p b), and the power of two is removed from the finished sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.formats.parts import scales
from vllm_kvq.triton_kernels.lang import INTERPRETED, load_some
from vllm_kvq.triton_kernels.version import old_triton

SHIFT: tl.constexpr = tl.constexpr(scales.SHIFT)
TWO_BYTES: tl.constexpr = tl.constexpr((255 << scales.SHIFT) * 0x00010001)
ONES: tl.constexpr = tl.constexpr((0x3C00 >> scales.SHIFT) * 0x01010101)
"""Four scales of 1."""
JOINS_MATTER: tl.constexpr = tl.constexpr(old_triton() and not INTERPRETED.value)


@triton.jit
def mma_order(k):
    """The index of a plane at place k of a matrix product's reduction.

    A word holds the codes of 4 consecutive indices, its bytes 0 and 2 become one register of the operand and its
    bytes 1 and 3 another. In the B fragment of m16n8k16 a lane holds places 2 l, 2 l + 1 in one register and
    2 l + 8, 2 l + 9 in the other (l = lane % 4), so with this order each lane unpacks its own whole words.
    """
    return (k & -16) | (((k >> 1) & 3) << 2) | ((k & 1) << 1) | ((k >> 3) & 1)


@triton.jit
def lane_rows():
    """(32, 1): g of lane 4 g + t."""
    return (tl.arange(0, 32) >> 2)[:, None]


@triton.jit
def lane_quads():
    """(32, 1): t of lane 4 g + t."""
    return (tl.arange(0, 32) & 3)[:, None]


@triton.jit
def fragment_places(R: tl.constexpr):
    """R indices of each lane, as an addend to pointers (32 lanes, R): R g + r for lane 4 g + t."""
    return lane_rows() * R + tl.arange(0, R)[None, :]


@triton.jit
def chunk_words(codes_ptr, INDEX: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Words (32, 4): codes of four tokens and a quad of channels; chunks of other planes have the same words."""
    quad = lane_quads()
    return load_some(codes_ptr + INDEX * CHUNK % WIDTH * 8 + quad * 32 + fragment_places(4), quad * 4, CHUNK, 16)


@triton.jit
def fragment_channels(M: tl.constexpr):
    """(4 M, 4): 4 t + e, for data of the rows of a right operand of M columns: see `lanes_of_columns`."""
    return ((tl.arange(0, 4 * M) & 3) * 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def byte_scales(words_ptr, quad, byte, there):
    """Scales of one byte (formats/parts/scales.py) as float16: of token 4 quad + byte. 0 where not `there`."""
    word = tl.load(words_ptr + quad, mask=there, other=0)
    return (((word >> (byte * 8)) & 255) << SHIFT).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _byte_pairs(words):
    """Words of four scales -> words of two float16 numbers each: bytes 0 and 2, and bytes 1 and 3."""
    return (words << SHIFT) & TWO_BYTES, (words >> (8 - SHIFT)) & TWO_BYTES


@triton.jit
def byte_rows(words):
    """Words (32, 1) of four scales -> float16 (32, 4)."""
    even, odd = _byte_pairs(words)
    parts = tl.join(tl.join(_low(even), _low(even >> 16)), tl.join(_low(odd), _low(odd >> 16)))  # (32, 1, half, odd)
    return tl.reshape(_settled(parts), (32, 4))


@triton.jit
def byte_columns(words):
    """Words (4 M, 1) of four scales, of index 4 t + e at [4 m + t] -> right operand (16, M) in `mma_order`."""
    m: tl.constexpr = words.shape[0] // 4
    even, odd = _byte_pairs(words)
    parts = _settled(tl.join(tl.join(_low(even), _low(even >> 16)), tl.join(_low(odd), _low(odd >> 16))))
    return tl.reshape(tl.permute(tl.reshape(parts, (m, 4, 2, 2)), (3, 1, 2, 0)), (16, m))


@triton.jit
def byte_left_rows(words, others):
    """Words (32, 1) of four scales each, and those of eight more rows -> left operand (16, 16) in `mma_order`."""
    even, odd = _byte_pairs(tl.reshape(tl.join(words, others), (32, 2)))
    return _operand(even, odd)


@triton.jit
def fragment_index(place, R: tl.constexpr):
    """The index in each row of a finished product, or of its left operand, of R groups of 8 rows."""
    return (place & 7) * R + (place >> 3)


@triton.jit
def fragment_rows(x, M: tl.constexpr):
    """One number per row, (32, R), equal in the four lanes of a row -> (8 R, M)."""
    r: tl.constexpr = x.shape[1]
    x = tl.broadcast_to(tl.reshape(x, (8, 4, r))[:, :, :, None, None], (8, 4, r, M // 8, 2))
    return tl.reshape(tl.permute(x, (2, 0, 3, 1, 4)), (8 * r, M))


@triton.jit
def tokens_in_order(scores):
    """Rows (32, M) of a product of `fragment_places(4)` -> in `mma_order`."""
    m: tl.constexpr = scores.shape[1]
    # token bits (g2 g1 g0 r1 r0) at place bits (r1 r0 g2 g1 g0) -> (g2 r0 g1 g0 r1)
    scores = tl.reshape(scores, (2, 2, 2, 4, m))
    return tl.reshape(tl.permute(scores, (2, 1, 3, 0, 4)), (32, m))


@triton.jit
def repeat_rows(x, N: tl.constexpr):
    """(R, M) -> (N R, M)."""
    r: tl.constexpr = x.shape[0]
    m: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None, :, :], (N, r, m)), (N * r, m))


@triton.jit
def lanes_of_columns(x):
    """The right operand of a product (16, M), its rows in `mma_order`, -> (4 M, 4): index 4 t + e at [4 m + t, e]."""
    m: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (2, 4, 2, m)), (3, 1, 2, 0)), (4 * m, 4))


@triton.jit
def columns_of_lanes(x):
    """The inverse."""
    m: tl.constexpr = x.shape[0] // 4
    return tl.reshape(tl.permute(tl.reshape(x, (m, 4, 2, 2)), (3, 1, 2, 0)), (16, m))


@triton.constexpr_function
def signed_low(second, bits):
    """The number of bits by which `signed_pair` leaves its first (0) and its second (1) operand too large."""
    return 4 * second if bits == 2 else 0


@triton.jit
def _settled(parts):
    """The same value. Triton before 3.7 would give a joined operand another layout, at the cost of shuffles."""
    if JOINS_MATTER:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [parts], parts.dtype, False, 2)
    else:
        return parts


@triton.jit
def left_operand(b0, b1, b2, b3):
    """Float16 numbers for the four bytes of (32, R) words -> left operand (8 R, 16) in `mma_order`."""
    r: tl.constexpr = b0.shape[1]
    parts = _settled(tl.join(tl.join(b0, b1), tl.join(b2, b3)))  # (32, R, odd, half)
    return tl.reshape(tl.permute(tl.reshape(parts, (8, 4, r, 2, 2)), (2, 0, 3, 1, 4)), (8 * r, 16))


@triton.jit
def _low(x):
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _operand(even, odd):
    """Masked words of bytes 0 and 2, and of bytes 1 and 3, (32, R) -> left operand (8 R, 16) in `mma_order`."""
    return left_operand(_low(even), _low(odd), _low(even >> 16), _low(odd >> 16))


@triton.jit
def left_rows(x, others):
    """Numbers (32, 4) of index 4 t + e, and those of eight more rows -> left operand (16, 16) in `mma_order`."""
    parts = tl.reshape(tl.join(x, others), (32, 2, 2, 2))  # (32, half, odd, R)
    parts = tl.reshape(_settled(tl.permute(parts, (0, 3, 2, 1))), (8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (2, 0, 3, 1, 4)), (16, 16))


@triton.jit
def plane(words, P: tl.constexpr, BITS: tl.constexpr):
    """The codes of plane P of (32, R) words as left operand (8 R, 16), times 2^(P BITS - 24)."""
    mask: tl.constexpr = (((1 << BITS) - 1) << (P * BITS)) * 0x00010001
    return _operand(words & mask, (words >> 8) & mask)


@triton.jit
def _merge(x, y, mask):
    """The bits of x where the mask has ones, else of y: one instruction, unless the compiler knows the mask."""
    return ((x ^ y) & mask) ^ y


@triton.jit
def _moved(words, LEFT: tl.constexpr):
    return words << LEFT if LEFT >= 0 else words >> -LEFT


@triton.jit
def _rotated(words, left):
    """Shifts to the left by -31 to 31 bits: a single instruction when written this way."""
    bits = words.to(tl.uint32, bitcast=True)
    left = left.to(tl.uint32, bitcast=True)
    return ((bits << (left & 31)) | (bits >> ((0 - left) & 31))).to(tl.int32, bitcast=True)


@triton.jit
def signed_pair(
    words, others, signs, full, P: tl.constexpr, OTHER: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr
):
    """Plane P of `words` and plane OTHER of `others`, each code with a sign as its next higher bit: two left operands
    (8 R, 16) of products, times 2^(signed_low - 24).

    words, others, signs (32, R). Bit 8 b + FIRST + t of signs[4 g + t] is the sign of byte b of `words`, and the bit
    four higher that of `others` (formats/parts/planes.py, pack_sign_words): both fields of two bits lie in one byte,
    four apart, and one shift and one merge give them their signs. `full` is -1: see `_merge`.
    """
    t = lane_quads()
    if BITS == 2:
        # an even plane and the one two bits higher in the same words go into nibbles together
        up: tl.constexpr = P % 2 if P % 2 == OTHER % 2 else 0
        both = _merge(_moved(words, 2 * (up - P)), _moved(others, 4 + 2 * (up - OTHER)), full & 0x0F0F0F0F)
        both = _merge(_rotated(signs, (2 - FIRST - t) & full), _moved(both, -2 * up), full & 0x44444444)
        shifted = both >> 8
        return (
            _operand(both & 0x00070007, shifted & 0x00070007),
            _operand(both & 0x00700070, shifted & 0x00700070),
        )
    else:
        low = _merge(signs << ((4 - FIRST - t) & 31), _moved(words, -4 * P), full & 0x10101010)
        high = _merge(signs >> (FIRST + t), _moved(others, -4 * OTHER), full & 0x10101010)
        return (
            _operand(low & 0x001F001F, (low >> 8) & 0x001F001F),
            _operand(high & 0x001F001F, (high >> 8) & 0x001F001F),
        )

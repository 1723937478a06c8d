"""Small device functions that all kernels share.

Only builtins of `triton.language` are called from the kernels (never `tl.sum`, `tl.zeros`, ..., which are themselves
jit functions): then the interpreter can be switched on for these modules alone, whatever imported Triton before.

Codes become matrix operands without any conversion. A b-bit code in the low 10 bits of a 16-bit lane, read as
float16, is the subnormal number

    code * 2^(shift - 24)

which the matrix units multiply exactly. So one `and` turns two codes into two operands, plane p is left where it
lies (shift = p b), and the power of two is taken out of the finished sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC: tl.constexpr = tl.constexpr(0x3151564B)  # formats/page.py
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
SUBNORMAL: tl.constexpr = tl.constexpr(16777216.0)  # 2^24
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
LIMIT: tl.constexpr = tl.constexpr(32768.0)  # formats/quant.py
TINY: tl.constexpr = tl.constexpr(2.0**-24)
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to even


@triton.jit
def row_max(x):
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def row_sum(x):
    return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def column_max(x):
    return tl.reduce(x, 0, tl.standard._elementwise_max)


@triton.jit
def column_sum(x):
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def clean(x):
    """Finite float32 within +-LIMIT, as formats/quant.py's `sanitize`."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def lost(x):
    """How many elements of (T, C) `clean` replaces."""
    bad = ((x == x) & (tl.abs(x) <= LIMIT)) == 0
    return tl.reduce(tl.reduce(bad.to(tl.int32), 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)


@triton.jit
def mma_order(k):
    """Which index of a plane stands at place k of a matrix product's reduction.

    A word holds the codes of 4 consecutive indices, its bytes 0 and 2 become one register of the operand and its
    bytes 1 and 3 another. In the B fragment of m16n8k16 a lane holds places 2 l, 2 l + 1 in one register and
    2 l + 8, 2 l + 9 in the other (l = lane % 4), so with this order a lane unpacks whole words of its own.
    """
    return (k & -16) | (((k >> 1) & 3) << 2) | ((k & 1) << 1) | ((k >> 3) & 1)


@triton.jit
def _halves(x):
    """int32 (X, Q) -> float16 (X, Q, 2): the same bits, low half first."""
    low = x.to(tl.int16).to(tl.float16, bitcast=True)
    high = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def spread(even, odd):
    """Masked words of bytes 0 and 2, and of bytes 1 and 3, (X, Q) -> float16 operand (X, 4 Q) in `mma_order`."""
    rows: tl.constexpr = even.shape[0]
    quads: tl.constexpr = even.shape[1]
    both = tl.join(_halves(even), _halves(odd))  # (X, Q, half, odd)
    both = tl.reshape(both, (rows, quads // 4, 4, 2, 2))
    return tl.reshape(tl.permute(both, (0, 1, 4, 2, 3)), (rows, 4 * quads))


@triton.jit
def plane(words, P: tl.constexpr, BITS: tl.constexpr):
    """Plane-quad words (X, Q) -> the codes of plane P as float16 (X, 4 Q), times 2^(P BITS - 24)."""
    mask: tl.constexpr = (((1 << BITS) - 1) << (P * BITS)) * 0x00010001
    return spread(words & mask, (words >> 8) & mask)


@triton.constexpr_function
def signed_place(p, bits):
    """Where `signed_plane` leaves plane p: in place, but the last one a plane lower, for its sign has no room above."""
    return min(p * bits, 8 - 2 * bits)


@triton.jit
def signed_plane(words, signs, quad, P: tl.constexpr, BITS: tl.constexpr):
    """`plane`, times 2^(signed_place - 24), with a sign as the code's next higher bit.

    words (X, Q), signs (X,): bit 8 b + quad[q] is that of byte b of word q (formats/planes.py, pack_sign_words).
    """
    low: tl.constexpr = signed_place(P, BITS)
    top: tl.constexpr = low + BITS
    # the signs of a word's four codes, rotated to where they belong, replace the bits above the codes
    turn = ((top - quad) & 31)[None, :].to(tl.uint32)
    bits = signs[:, None].to(tl.uint32, bitcast=True)
    bits = ((bits << turn) | (bits >> ((32 - turn) & 31))).to(tl.int32, bitcast=True)
    place: tl.constexpr = 0x01010101 << top
    both = ((words >> (P * BITS - low)) & (-1 - place)) | (bits & place)
    mask: tl.constexpr = (((2 << BITS) - 1) << low) * 0x00010001
    return spread(both & mask, (both >> 8) & mask)

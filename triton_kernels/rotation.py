# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""The Hadamard matrix of formats/parts/rotation.py, without its 1 / sqrt(b)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def levels(size):
    """The logarithm of a power of two."""
    return size.bit_length() - 1


@triton.jit
def _signs(SIZE: tl.constexpr, LEFT_OUT: tl.constexpr):
    """H (SIZE, SIZE): -1 where two places have an odd number of bits in common. Places with the bits LEFT_OUT are
    padding."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    x = i & j
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    return tl.where(((i | j) & LEFT_OUT) == 0, 1.0 - 2.0 * (x & 1).to(tl.float32), 0.0)


@triton.jit
def rotated_back(blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """D channels in blocks of BLOCK, (places, M), their places in `fragment_index`, times H of SIZE channels.

    H treats each bit of an index separately, and `fragment_index` only permutes bits: inside a block it is therefore
    the same matrix, and across blocks it is sums and differences.
    """
    for level in tl.static_range(levels(SIZE // BLOCK)):
        out = ()
        for i in tl.static_range(D // BLOCK):
            if i >> level & 1:
                out = out + (blocks[i ^ 1 << level] - blocks[i],)
            else:
                out = out + (blocks[i] + blocks[i ^ 1 << level],)
        blocks = out
    places: tl.constexpr = blocks[0].shape[0]
    # a block of 8 or 4 takes those of the 16 places whose index is below that
    h = _signs(places, 8 - BLOCK // 2 if places > BLOCK else 0)
    out = ()
    for i in tl.static_range(D // BLOCK):
        # in two parts that tf32 can represent
        most = (blocks[i].to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        x = tl.dot(h, blocks[i] - most, input_precision="tf32")
        out = out + (tl.dot(h, most, x, input_precision="tf32"),)
    return out


@triton.jit
def rotated(x, SIZE: tl.constexpr):
    """Rows of channels (tokens, channels) times H / SIZE, in blocks of SIZE channels."""
    tokens: tl.constexpr = x.shape[0]
    channel = tl.broadcast_to(tl.arange(0, x.shape[1])[None, :], (tokens, x.shape[1]))
    for level in tl.static_range(levels(SIZE)):
        other = tl.gather(x, channel ^ (1 << level), 1)
        x = other + tl.where((channel & (1 << level)) == 0, x, -x)
    return x * (1.0 / SIZE)

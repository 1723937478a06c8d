# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Adds the high digits of Kitty's boosted channels to the scores of one slab (formats/methods/kitty.py).

    s = sum_c (q_c |scale_c|) low_ct + sum_c q_c zero_c + sum_j (4 q_b |scale_b|) high_jt,   b the j-th boosted channel

The first two sums are `channel_scores`. Which channels are boosted differs from slab to slab, so the queries of the
last sum are gathered: every lane finds one boosted channel in the signs of the scales, and loads its scale; then all
lanes learn which channels belong to their places in the operand, and load these from the query.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import columns_of_lanes, fragment_places, lane_quads, plane
from vllm_kvq.triton_kernels.lang import INTERPRETED


@triton.jit
def _ones(x):
    """The number of bits that are set in int32."""
    if INTERPRETED:  # does not support assembly
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = x + (x >> 8)
        return (x + (x >> 16)) & 63
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def _sign_words(scale_ptr, D: tl.constexpr):
    """Bit i of word w is the sign of channel 32 w + i."""
    bit = tl.arange(0, 32)
    words = ()
    for w in tl.static_range(D // 32):
        negative = tl.load(scale_ptr + w * 32 + bit).to(tl.int16, bitcast=True) < 0
        words = words + (tl.reduce(tl.where(negative, 1 << bit, 0), 0, tl.standard._sum_combine).to(tl.int32),)
    return words


@triton.jit
def _place(words, j, D: tl.constexpr):
    """For each j the channel of the j-th bit that is set; any channel if fewer bits are set."""
    before = j * 0
    first, rank, word = before, j, before + words[0]
    for w in tl.static_range(1, D // 32):
        before += _ones(words[w - 1])
        beyond = j >= before
        first = tl.where(beyond, w * 32, first)
        rank = tl.where(beyond, j - before, rank)
        word = tl.where(beyond, words[w], word)
    for half in tl.static_range(5):
        below = _ones(word & ((1 << (16 >> half)) - 1))
        beyond = rank >= below
        first += tl.where(beyond, 16 >> half, 0)
        rank = tl.where(beyond, rank - below, rank)
        word = tl.where(beyond, word >> (16 >> half), word)
    return first


@triton.jit
def _every_row(x, M: tl.constexpr):
    """(16,) numbers of a right operand's index -> `lanes_of_columns`, (4 M, 4), equal in all its columns."""
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (4, 4))[None, :, :], (M, 4, 4)), (4 * M, 4))


@triton.constexpr_function
def _different(quads):
    """How many products of 4 quads have different words from the previous ones: planes of `quads` quads share words."""
    return quads // (4 if quads % 4 == 0 else 2 if quads % 2 == 0 else 1)


@triton.jit
def boosted_scores(
    scores,
    query_ptr,
    factor,
    words_ptr,
    halves_ptr,
    R: tl.constexpr,
    K: tl.constexpr,
    SLABS: tl.constexpr,
    M: tl.constexpr,
):
    """Adds the high digits' part to the scores of SLABS slabs.

    query_ptr (4 M, 1) points to the query of each lane's row, factor (4 M, 1) is its factor. The planes of
    the high digits need no factors: a lane moves its own to the lowest bits.
    """
    quads: tl.constexpr = K.boosted // 16  # of a plane
    different: tl.constexpr = _different(quads)
    lane = lane_quads()
    out = ()
    for s in tl.static_range(SLABS):
        scale_ptr = halves_ptr + s * R.slab_words * 2 + K.scale
        high_ptr = words_ptr + s * R.slab_words + K.high + fragment_places(4)
        signs = _sign_words(scale_ptr, R.d)
        sums = scores[s]
        high = ()
        for n in tl.static_range(different):
            high = high + (tl.load(high_ptr + (4 * n + lane) % quads * 32),)
        for pair in tl.static_range((quads + 1) // 2):
            channel = _place(signs, pair * 32 + tl.arange(0, 32), R.d)
            size = tl.load(scale_ptr + channel).to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
            both = tl.reshape(size << 8 | channel, (2, 16))
            halves = tl.split(tl.permute(both, (1, 0)))
            for n in tl.static_range(2 * pair, min(2 * pair + 2, quads)):
                known = _every_row(halves[n % 2], M)
                at = known & 255
                if R.head < R.d:  # false only for bytes that were never packed
                    at = tl.minimum(at, R.head - 1)
                x = tl.load(query_ptr + at).to(tl.float32) * factor
                x *= (known >> 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                digits = plane(high[n % different] >> ((4 * n + lane) // quads * 2), 0, 2)
                sums = tl.dot(digits, columns_of_lanes(x.to(tl.float16)), sums)
        out = out + (sums,)
    return out

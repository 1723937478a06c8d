# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Weighted values of one slab, which `attend` adds to its accumulators.

The d output channels are cut into blocks that lie in one plane and one group; every block has its own accumulator
(w, M), where w is at least 16, the matrix units' minimum. Accumulators hold sums over codes where they lie, too small
by 2^(s - 24) (`value_shift`), which is undone once at the end. Blocks are in the order of `fragment_index`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import (
    ONES,
    byte_columns,
    byte_left_rows,
    columns_of_lanes,
    fragment_channels,
    fragment_index,
    fragment_places,
    fragment_rows,
    lane_quads,
    lane_rows,
    left_rows,
    plane,
    repeat_rows,
    signed_low,
    signed_pair,
    tokens_in_order,
)
from vllm_kvq.triton_kernels.lang import SUBNORMAL, product


@triton.constexpr_function
def value_shift(p, by_token, bits):
    """The number of bits by which the codes of plane p are too large where they lie."""
    return p * bits if by_token else signed_low(1, bits)


@triton.jit
def block_words(
    words_ptr, FIRST: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, PLANE: tl.constexpr, CODES: tl.constexpr
):
    """Words (32, PLACES / 8) of the first and of the last 16 tokens, of a plane's channels from FIRST on."""
    own = fragment_places(PLACES // 8)
    place = words_ptr + CODES + FIRST + lane_quads() * PLANE + own
    if BLOCK == PLACES:
        return tl.load(place), tl.load(place + 4 * PLANE)
    else:
        return (
            tl.load(place, mask=own < BLOCK, other=0),
            tl.load(place + 4 * PLANE, mask=own < BLOCK, other=0),
        )


@triton.jit
def _by_sixteen(weights):
    """(32 tokens in `fragment_index`, M) -> right operands (16, M) of the first and of the last 16 tokens."""
    m: tl.constexpr = weights.shape[1]
    return tl.split(tl.permute(tl.reshape(tokens_in_order(weights), (2, 16, m)), (1, 2, 0)))


@triton.constexpr_function
def sums_weights(d, group):
    """Whether `token_values` has rows to spare for the sum of the weights."""
    return d <= 8 * group


@triton.constexpr_function
def _high_factor(channel, d, bits):
    """What a highest bit is worth above the other `bits`, with both where they lie."""
    return 1 << bits + channel // (d * bits // 8) * bits - channel // (d // 8)


@triton.jit
def _zero_rows(words_ptr, halves_ptr, live, R: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr):
    """Zeros of 16 tokens from FIRST on, (groups, tokens), as left operand (16, 16); its last rows are 1 if it has eight
    to spare. Searched values have one group, whose zero stands in all of the first eight rows."""
    groups: tl.constexpr = (R.d + V.group - 1) // V.group
    g, token = lane_rows(), fragment_channels(8)
    place = halves_ptr + V.zero + g * 32 + FIRST + token
    if V.searched:
        quad = lane_quads()
        word = tl.load(words_ptr + V.zero + FIRST // 4 + quad, mask=quad < 4 * live, other=0)
        return byte_left_rows(word, tl.full((32, 1), ONES, tl.int32))
    else:
        zero = tl.load(place, mask=g < groups * live, other=0.0)
        if sums_weights(R.d, V.group):
            return left_rows(zero, tl.full((32, 4), 1.0, tl.float16))
        else:
            return left_rows(zero, tl.load(place + 8 * 32, mask=g + 8 < groups * live, other=0.0))


@triton.jit
def token_values(weights, acc, extra, words_ptr, halves_ptr, live, R: tl.constexpr, V: tl.constexpr):
    """Per token and group: v = zero_tg + scale_tg code, so

        o_c = sum_t (w_t scale_tg) code_tc + sum_t w_t zero_tg

    Searched values (formats/methods/klt.py) are the same with one group: v = step (middle zero_t + scale_t code) with
    the scale as zero, too. A code of three bits has its highest one in a plane of its own, from V.high on: d / 8
    channels of one bit, so that each block of channels is in one plane there and in one here.

    `acc` holds the sums over codes by block, `extra` (16, M) the sums over zeros by group; if it has eight rows to
    spare, the last ones are the sums of the weights, the softmax's denominators.
    """
    blocks: tl.constexpr = R.d // V.block
    width: tl.constexpr = R.d * V.bits // 8
    m: tl.constexpr = weights.shape[1]
    token = fragment_channels(m)
    there = token < 32 * live  # no part of an unpacked slab may enter a sum, not even multiplied by zero
    first, last = _by_sixteen(weights.to(tl.float16))
    extra = tl.dot(_zero_rows(words_ptr, halves_ptr, live, R, V, 0), first, extra)
    extra = tl.dot(_zero_rows(words_ptr, halves_ptr, live, R, V, 16), last, extra)
    out = ()
    for i in tl.static_range(blocks):
        if i * V.block % V.group == 0:
            if V.searched:
                quad = (tl.arange(0, 4 * m) & 3)[:, None]
                scale = byte_columns(tl.load(words_ptr + V.scale + quad, mask=quad < 4 * live, other=0))
                others_scale = byte_columns(tl.load(words_ptr + V.scale + 4 + quad, mask=quad < 4 * live, other=0))
            else:
                place = halves_ptr + V.scale + i * V.block // V.group * 32 + token
                scale = columns_of_lanes(tl.load(place, mask=there, other=0.0))
                others_scale = columns_of_lanes(tl.load(place + 16, mask=there, other=0.0))
            scaled, others_scaled = product(first, scale), product(last, others_scale)
        words, others = block_words(words_ptr, i * V.block % width, V.block, V.places, width, V.codes)
        sums = tl.dot(plane(words, i * V.block // width, V.bits), scaled, acc[i])
        sums = tl.dot(plane(others, i * V.block // width, V.bits), others_scaled, sums)
        if V.high > 0:
            words, others = block_words(words_ptr, i * V.block % (R.d // 8), V.block, V.places, R.d // 8, V.high)
            factor = tl.full(scaled.shape, _high_factor(i * V.block, R.d, V.bits), tl.float16)
            sums = tl.dot(plane(words, i * V.block // (R.d // 8), 1), product(scaled, factor), sums)
            sums = tl.dot(plane(others, i * V.block // (R.d // 8), 1), product(others_scaled, factor), sums)
        out = out + (sums,)
    return out, extra


@triton.jit
def _hybrid_block(
    weights,
    total,
    acc,
    words_ptr,
    halves_ptr,
    live,
    full,
    V: tl.constexpr,
    FIRST: tl.constexpr,
    PLANE: tl.constexpr,
):
    rows: tl.constexpr = V.places // 8
    m: tl.constexpr = weights[0].shape[1]
    own = fragment_places(rows)
    # no part of an unpacked slab may enter a sum, not even multiplied by zero
    there = own < V.block * live
    mode = tl.load(halves_ptr + V.scale + FIRST + own, mask=there, other=0.0).to(tl.float32)
    slot = tl.load(words_ptr + V.slot + FIRST + own, mask=there, other=0)
    symmetric = mode < 0
    zero = tl.where(symmetric, 0.0, slot.to(tl.float32, bitcast=True))
    signs = tl.where(symmetric, slot, -1)
    words, others = block_words(words_ptr, FIRST % PLANE, V.block, V.places, PLANE, V.codes)
    first, second = signed_pair(words, others, signs, full, FIRST // PLANE, FIRST // PLANE, 0, V.bits)
    part = tl.dot(second, weights[1], tl.dot(first, weights[0], repeat_rows(total, V.places // 16)))
    acc += part * fragment_rows(tl.abs(mode), m)
    return acc + repeat_rows(total * (-1.0 / (1 << V.bits)), V.places // 16) * fragment_rows(zero, m)


@triton.jit
def hybrid_values(weights, acc, words_ptr, halves_ptr, live, full, R: tl.constexpr, V: tl.constexpr):
    """InnerQ: v = zero_c + scale_c (code' - 2^b), per channel over the slab's tokens, so

        o_c = scale_c (sum_t w_t code'_tc - 2^b sum_t w_t) + zero_c sum_t w_t

    code' and zero as in keys/channel.py. Returns the accumulators and -2^b sum_t w_t, whose sums over the slabs are
    also the softmax's denominators. `live` is 0 for a slab that is not packed, else 1.
    """
    blocks: tl.constexpr = R.d // V.block
    width: tl.constexpr = R.d * V.bits // 8
    first: tl.constexpr = signed_low(0, V.bits)
    second: tl.constexpr = signed_low(1, V.bits)
    # the first operand's codes are shifted up less than the second's
    lift = tl.where(fragment_index(tl.arange(0, 32), 4) < 16, 1 << (second - first), 1)
    weights = _by_sixteen(weights.to(tl.float16) * lift.to(tl.float16)[:, None])
    total = tl.dot(tl.full((16, 16), -(1 << V.bits << first) / SUBNORMAL, tl.float16), weights[0])
    total = tl.dot(tl.full((16, 16), -(1 << V.bits << second) / SUBNORMAL, tl.float16), weights[1], total)
    out = ()
    for i in tl.static_range(blocks):
        out = out + (_hybrid_block(weights, total, acc[i], words_ptr, halves_ptr, live, full, V, i * V.block, width),)
    return out, total

# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Weighted values of one slab: what `attend` adds to its accumulators.

The d output channels are cut into blocks that lie in one plane and one group; every block has its own accumulator
(w, M), where w is at least 16, the matrix units' least. Accumulators hold sums over codes where they lie, 2^(s - 24)
too small (`value_shift`): undone once at the end. InnerQ's blocks stand in the order of `fragment_index`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import (
    SUBNORMAL,
    fragment_places,
    fragment_rows,
    mma_order,
    plane,
    repeat_rows,
    signed_low,
    signed_pair,
)

TOKEN: tl.constexpr = tl.constexpr(0)
HYBRID: tl.constexpr = tl.constexpr(1)


@triton.constexpr_function
def value_shift(p, values, bits):
    """By how many bits the codes of plane p are too large where they lie."""
    return signed_low(1, bits) if values == HYBRID else p * bits


@triton.jit
def value_words(
    words_ptr, FIRST: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PLANE: tl.constexpr, CODES: tl.constexpr
):
    """(PLACES, 8 token quads) words of a plane of PLANE channels, from channel FIRST on; zero from WIDTH on."""
    quad, column = tl.arange(0, 8), tl.arange(0, PLACES)
    place = words_ptr + CODES + quad[None, :] * PLANE + FIRST + column[:, None]
    if WIDTH == PLACES:
        return tl.load(place)
    else:
        return tl.load(place, mask=(column < WIDTH)[:, None], other=0)


@triton.jit
def _token_block(
    weights,
    acc,
    words_ptr,
    halves_ptr,
    seen,
    FIRST: tl.constexpr,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Channels [FIRST, FIRST + BLOCK): all in one plane and in one group."""
    token = mma_order(tl.arange(0, 32))
    scale = tl.load(halves_ptr + SCALE + FIRST // GROUP * 32 + token, mask=seen, other=0.0)
    words = value_words(words_ptr, FIRST % PLANE, BLOCK, PLACES, PLANE, CODES)
    return tl.dot(plane(words, FIRST // PLANE, BITS), weights * scale[:, None], acc)


@triton.jit
def token_values(
    weights,
    acc,
    extra,
    words_ptr,
    halves_ptr,
    seen,
    D: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Per token and group: v = zero_tg + scale_tg code, so

        o_c = sum_t (w_t scale_tg) code_tc + sum_t w_t zero_tg

    `acc` are the sums over codes by block, `extra` (GROUPS, M) the sums over zeros by group.
    """
    width: tl.constexpr = D * BITS // 8
    token = mma_order(tl.arange(0, 32))
    group = tl.arange(0, GROUPS)
    # what is not seen may be unpacked, and its bytes NaN
    inside = seen[None, :] & (group < (D + GROUP - 1) // GROUP)[:, None]
    zero = tl.load(halves_ptr + ZERO + group[:, None] * 32 + token[None, :], mask=inside, other=0.0)
    weights = weights.to(tl.float16)
    extra = tl.dot(zero, weights, extra)
    out = ()
    for i in tl.static_range(D // BLOCK):
        out = out + (
            _token_block(
                weights,
                acc[i],
                words_ptr,
                halves_ptr,
                seen,
                i * BLOCK,
                width,
                BITS,
                GROUP,
                BLOCK,
                PLACES,
                CODES,
                SCALE,
            ),
        )
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
    FIRST: tl.constexpr,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
):
    rows: tl.constexpr = PLACES // 8
    m: tl.constexpr = weights[0].shape[1]
    own = fragment_places(rows)
    # nothing of an unpacked slab may enter a sum, not even times zero
    there = own < BLOCK * live
    mode = tl.load(halves_ptr + SCALE + FIRST + own, mask=there, other=0.0).to(tl.float32)
    slot = tl.load(words_ptr + SLOT + FIRST + own, mask=there, other=0)
    symmetric = mode < 0
    zero = tl.where(symmetric, 0.0, slot.to(tl.float32, bitcast=True))
    signs = tl.where(symmetric, slot, -1)
    place = words_ptr + CODES + FIRST % PLANE + tl.arange(0, 4)[None, :, None] * PLANE + own
    if BLOCK == PLACES:
        words, others = tl.load(place), tl.load(place + 4 * PLANE)
    else:
        words = tl.load(place, mask=own < BLOCK, other=0)
        others = tl.load(place + 4 * PLANE, mask=own < BLOCK, other=0)
    first, second = signed_pair(words, others, signs, full, FIRST // PLANE, FIRST // PLANE, 0, BITS)
    part = tl.dot(second, weights[1], tl.dot(first, weights[0], repeat_rows(total, PLACES // 16)))
    acc += part * fragment_rows(tl.abs(mode), m)
    return acc + repeat_rows(total * (-1.0 / (1 << BITS)), PLACES // 16) * fragment_rows(zero, m)


@triton.jit
def hybrid_values(
    weights,
    acc,
    words_ptr,
    halves_ptr,
    live,
    full,
    D: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
):
    """InnerQ: v = zero_c + scale_c (code' - 2^b), per channel over the slab's tokens, so

        o_c = scale_c (sum_t w_t code'_tc - 2^b sum_t w_t) + zero_c sum_t w_t

    code' and zero as in keys.py. Returns the accumulators and -2^b sum_t w_t, whose sums over the slabs are the
    softmax's denominators, too. `live` is 0 for a slab that is not packed, else 1.
    """
    width: tl.constexpr = D * BITS // 8
    weights = weights.to(tl.float16)
    m: tl.constexpr = weights.shape[1]
    first: tl.constexpr = signed_low(0, BITS)
    second: tl.constexpr = signed_low(1, BITS)
    # the first operand's codes are less far up than the second's
    lift = tl.where(tl.arange(0, 32) < 16, 1 << (second - first), 1)
    weights = weights * lift.to(tl.float16)[:, None]
    weights = tl.split(tl.permute(tl.reshape(weights, (2, 16, m)), (1, 2, 0)))
    total = tl.dot(tl.full((16, 16), -(1 << BITS << first) / SUBNORMAL, tl.float16), weights[0])
    total = tl.dot(tl.full((16, 16), -(1 << BITS << second) / SUBNORMAL, tl.float16), weights[1], total)
    out = ()
    for i in tl.static_range(D // BLOCK):
        out = out + (
            _hybrid_block(
                weights,
                total,
                acc[i],
                words_ptr,
                halves_ptr,
                live,
                full,
                i * BLOCK,
                width,
                BITS,
                BLOCK,
                PLACES,
                CODES,
                SCALE,
                SLOT,
            ),
        )
    return out, total

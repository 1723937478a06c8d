# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Weighted values of one slab: what `attend` adds to its accumulators.

The d output channels are cut into blocks that lie in one plane and one group; every block has its own accumulator
(w, M), where w is at least 16, the matrix units' least. Of per-token values accumulators hold sums over codes where
they lie, that is 2^(b p - 24) too small: undone once at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import SUBNORMAL, column_sum, mma_order, plane, signed_place, signed_plane

TOKEN: tl.constexpr = tl.constexpr(0)
HYBRID: tl.constexpr = tl.constexpr(1)


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
    FIRST: tl.constexpr,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
):
    column = tl.arange(0, PLACES)
    # nothing of an unpacked slab may enter a sum, not even times zero
    there = column < BLOCK * live
    mode = tl.load(halves_ptr + SCALE + FIRST + column, mask=there, other=0.0).to(tl.float32)
    slot = tl.load(words_ptr + SLOT + FIRST + column, mask=there, other=0)
    symmetric = mode < 0
    offset = tl.where(symmetric, mode * (1 << BITS), slot.to(tl.float32, bitcast=True))
    signs = tl.where(symmetric, slot, 0)
    words = value_words(words_ptr, FIRST % PLANE, BLOCK, PLACES, PLANE, CODES)
    part = tl.dot(signed_plane(words, signs, tl.arange(0, 8), FIRST // PLANE, BITS), weights)
    low: tl.constexpr = signed_place(FIRST // PLANE, BITS)
    lift: tl.constexpr = SUBNORMAL / (1 << low)
    return acc + part * (tl.abs(mode) * lift)[:, None] + total[None, :] * offset[:, None]


@triton.jit
def hybrid_values(
    weights,
    acc,
    words_ptr,
    halves_ptr,
    live,
    D: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
):
    """InnerQ: v = zero_c + scale_c code, or scale_c (code' - 2^b), per channel over the slab's tokens, so

        o_c = scale_c sum_t w_t code_tc + offset_c sum_t w_t

    `live` is 0 for a slab that is not packed, else 1.
    """
    width: tl.constexpr = D * BITS // 8
    weights = weights.to(tl.float16)
    total = column_sum(weights.to(tl.float32))
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
    return out

# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Scores (32 tokens in `mma_order`, M) of one slab for the M rows of one KV head.

Queries come as one float16 operand per plane, q_p = q / top * 4^-(b p / 2) = q / top * 2^-(b p), where top is the
row's largest |q|: codes of plane p are 2^(b p) too large where they lie, and |q_p| <= 1 keeps every product with a
float16 scale finite. Scores are returned divided by top * 2^24, which the softmax multiplies back per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import (
    SUBNORMAL,
    column_max,
    columns_of_lanes,
    fragment_channels,
    fragment_places,
    fragment_rows,
    mma_order,
    plane,
    repeat_rows,
    signed_low,
    signed_pair,
    tokens_in_order,
)

CHANNEL: tl.constexpr = tl.constexpr(0)
HYBRID: tl.constexpr = tl.constexpr(1)
POLAR: tl.constexpr = tl.constexpr(2)


@triton.jit
def key_places(KP: tl.constexpr):
    """The place in its chunk of each of the KP operand rows; chunks shorter than KP are filled with zeros."""
    return mma_order(tl.arange(0, KP))


@triton.constexpr_function
def key_shift(channel, d, keys, bits):
    """By how many bits the codes of a channel (not of PolarQuant's) are too large where they lie."""
    return signed_low(channel % 32 // 16, bits) if keys == HYBRID else channel // (d * bits // 8) * bits


@triton.jit
def query_channel(
    INDEX: tl.constexpr,
    at,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Channels of query operand INDEX: a chunk of channels, or the x or the y of a chunk of pairs."""
    if KEYS == POLAR:
        chunks: tl.constexpr = D // 2 // CHUNK
        pair = INDEX % chunks * CHUNK + at
        if INTERLEAVED:
            inside = 2 * pair + INDEX // chunks
        else:
            inside = pair + INDEX // chunks * (ROTARY // 2)
        # pairs outside RoPE, as in formats/polar.py
        outside = ROTARY // 2 + pair + INDEX // chunks * ((D - ROTARY) // 2)
        return tl.where(pair < ROTARY // 2, inside, outside)
    else:
        return INDEX * CHUNK + at


@triton.jit
def channel_scores(
    q,
    words_ptr,
    halves_ptr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
):
    """SQuat and KIVI: k = zero_c + scale_c code, so

        s = sum_c (q_c scale_c) code_c + sum_c q_c zero_c

    The scale goes into the query once per slab, the zero into one number per row.
    """
    width: tl.constexpr = D * BITS // 8
    at = key_places(KP)
    quad = tl.arange(0, KP // 4)
    token = mma_order(tl.arange(0, 32))
    place = CODES + quad[None, :] * 32 + token[:, None]
    if width == KP:
        words = tl.load(words_ptr + place)
    else:
        words = tl.load(words_ptr + place, mask=(quad < width // 4)[None, :], other=0)
    # the zeros' sum as a product too; its 16 rows are equal
    bias = tl.full((16, M), 0.0, tl.float32)
    for p in tl.static_range(8 // BITS - 1, -1, -1):
        zero = tl.load(halves_ptr + ZERO + p * width + at, mask=at < width, other=0.0)
        bias = tl.dot(tl.broadcast_to(zero[None, :], (16, KP)), q[p], bias * (1 << BITS))
    scores = tl.broadcast_to((column_max(bias) * (1.0 / SUBNORMAL))[None, :], (32, M))
    for p in tl.static_range(8 // BITS):
        scale = tl.load(halves_ptr + SCALE + p * width + at, mask=at < width, other=0.0)
        scores = tl.dot(plane(words, p, BITS), q[p] * scale[:, None], scores)
    return scores


@triton.jit
def hybrid_scores(
    q,
    words_ptr,
    halves_ptr,
    page_ptr,
    full,
    D: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
    NORM: tl.constexpr,
):
    """InnerQ: k = norm_c (zero_tg + scale_tg (code' - 2^b)), per token and group, so

        s = sum_g (scale_tg (sum_c x_c code'_c - 2^b sum_c x_c) + zero_tg sum_c x_c),   x_c = q_c norm_c

    code' is the code with a sign bit on top: its own if the group is symmetric, whose zero is 0, else always 1. So both
    modes are one product, which starts at -2^b sum_c x_c.
    """
    width: tl.constexpr = D * BITS // 8
    half: tl.constexpr = 16 // CHUNK
    own, quad = fragment_places(4), tl.arange(0, 4)[None, :, None]
    channel = fragment_channels(M)
    scores = tl.full((32, M), 0.0, tl.float32)
    for group in tl.static_range(D // 32):
        mode = tl.load(halves_ptr + SCALE + group * 32 + own).to(tl.float32)
        slot = tl.load(words_ptr + SLOT + group * 32 + own)
        symmetric = mode < 0
        zero = tl.where(symmetric, 0.0, slot.to(tl.float32, bitcast=True))
        signs = tl.where(symmetric, slot, -1)
        words, folded = (), ()
        whole = tl.full((16, M), 0.0, tl.float32)
        for i in tl.static_range(group * 2 * half, (group + 1) * 2 * half):
            place = words_ptr + CODES + i * CHUNK % width * 8 + quad * 32 + own
            norm_place = page_ptr + NORM + i * CHUNK + channel
            if CHUNK == 16:
                words = words + (tl.load(place),)
                norm = tl.load(norm_place)
            else:
                words = words + (tl.load(place, mask=quad < CHUNK // 4, other=0),)
                norm = tl.load(norm_place, mask=channel < CHUNK, other=0.0)
            folded = folded + (columns_of_lanes(q[i] * norm),)
            # -2^b, as much too large as the codes are
            top = tl.full((16, KP), -(1 << BITS << key_shift(i * CHUNK, D, HYBRID, BITS)) / SUBNORMAL, tl.float16)
            whole = tl.dot(top, folded[i % (2 * half)], whole)  # equal rows
        zeros = repeat_rows(whole * (-1.0 / (1 << BITS)), 2)
        part = repeat_rows(whole, 2)
        for c in tl.static_range(half):
            i = group * 2 * half + c
            first, second = signed_pair(
                words[c], words[c + half], signs, full,
                i * CHUNK // width, (i + half) * CHUNK // width, c * CHUNK // 4, BITS
            )  # fmt: skip
            part = tl.dot(second, folded[c + half], tl.dot(first, folded[c], part))
        scores += part * fragment_rows(tl.abs(mode), M)
        scores += zeros * fragment_rows(zero, M)
    return tokens_in_order(scores)

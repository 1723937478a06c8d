# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Scores (32 tokens in `fragment_index`, M) of one slab for the M rows of one KV head.

Queries come as one float16 operand per plane, q_p = q / top * 4^-(b p / 2) = q / top * 2^-(b p), where top is the
row's largest |q|: codes of plane p are 2^(b p) too large where they lie, and |q_p| <= 1 keeps every product with a
float16 scale finite. Scores are returned divided by top * 2^24, which the softmax multiplies back per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels import kinds
from vllm_kvq.triton_kernels.fragments import (
    chunk_words,
    columns_of_lanes,
    fragment_channels,
    fragment_places,
    fragment_rows,
    left_rows,
    plane,
    repeat_rows,
    signed_low,
    signed_pair,
)
from vllm_kvq.triton_kernels.lang import SUBNORMAL, load_some, product

CHANNEL: tl.constexpr = tl.constexpr(kinds.CHANNEL)
HYBRID: tl.constexpr = tl.constexpr(kinds.HYBRID)
POLAR: tl.constexpr = tl.constexpr(kinds.POLAR)
TRANSFORMED: tl.constexpr = tl.constexpr(kinds.TRANSFORMED)


@triton.constexpr_function
def key_shift(channel, d, keys, bits):
    """The number of bits by which a channel's codes (not PolarQuant's) are too large where they lie."""
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
        # pairs outside RoPE, as in formats/methods/polar.py
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
    SLABS: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    BOOSTED: tl.constexpr,
):
    """SQuat and KIVI: k = zero_c + scale_c code, so

        s = sum_c (q_c scale_c) code_c + sum_c q_c zero_c

    The scale goes into the query once per slab, the zero into one number per row. With BOOSTED channels a
    scale's sign has another meaning (boosted.py).
    """
    tl.static_assert(SLABS <= 2)
    width: tl.constexpr = D * BITS // 8
    chunks: tl.constexpr = width // CHUNK  # of a plane
    channel = fragment_channels(M)
    # the zeros' sums are also a product, with equal rows: eight for the first slab, eight for the last
    lane = fragment_channels(8)
    zeros = halves_ptr + ZERO + lane
    bias = tl.full((16, M), 0.0, tl.float32)
    for p in tl.static_range(8 // BITS - 1, -1, -1):
        bias *= 1 << BITS
        for c in tl.static_range(chunks):
            first = load_some(zeros + p * width + c * CHUNK, lane, CHUNK, 16)
            last = load_some(zeros + p * width + c * CHUNK + (SLABS - 1) * SLAB_WORDS * 2, lane, CHUNK, 16)
            bias = tl.dot(left_rows(first, last), columns_of_lanes(q[p * chunks + c]), bias)
    bias = tl.split(tl.permute(tl.reshape(bias * (1.0 / SUBNORMAL), (2, 8, M)), (1, 2, 0)))
    scores = ()
    for j in tl.static_range(SLABS):
        sums = repeat_rows(bias[j], 4)
        for c in tl.static_range(chunks):
            words = chunk_words(words_ptr + j * SLAB_WORDS + CODES, c, width, CHUNK)
            for p in tl.static_range(8 // BITS):
                place = halves_ptr + j * SLAB_WORDS * 2 + SCALE + p * width + c * CHUNK + channel
                scale = load_some(place, channel, CHUNK, 16)
                if BOOSTED > 0:
                    scale = tl.abs(scale)
                scaled = product(columns_of_lanes(q[p * chunks + c]), columns_of_lanes(scale))
                sums = tl.dot(plane(words, p, BITS), scaled, sums)
        scores = scores + (sums,)
    return scores


@triton.jit
def hybrid_scores(
    q,
    words_ptr,
    halves_ptr,
    page_ptr,
    full,
    D: tl.constexpr,
    SLABS: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
    NORM: tl.constexpr,
):
    """InnerQ: k = norm_c (zero_tg + scale_tg (code' - 2^b)), per token and group, so

        s = sum_g (scale_tg (sum_c x_c code'_c - 2^b sum_c x_c) + zero_tg sum_c x_c),   x_c = q_c norm_c

    code' is the code with a sign bit on top: its own in a symmetric group, whose zero is 0, else always 1. So both
    modes are one product, which starts at -2^b sum_c x_c.
    """
    width: tl.constexpr = D * BITS // 8
    half: tl.constexpr = 16 // CHUNK
    own, lane = fragment_places(4), fragment_channels(M)
    scores = ()
    for _ in tl.static_range(SLABS):
        scores = scores + (tl.full((32, M), 0.0, tl.float32),)
    for group in tl.static_range(D // 32):  # outside the loop, to avoid keeping x for all groups
        x = ()
        whole = tl.full((16, M), 0.0, tl.float32)
        for i in tl.static_range(group * 2 * half, (group + 1) * 2 * half):
            x = x + (columns_of_lanes(q[i] * load_some(page_ptr + NORM + i * CHUNK + lane, lane, CHUNK, 16)),)
            # -2^b, too large by the same factor as the codes
            top = -(1 << BITS << key_shift(i * CHUNK, D, HYBRID, BITS)) / SUBNORMAL
            whole = tl.dot(tl.full((16, 16), top, tl.float16), x[i - group * 2 * half], whole)
        # half of the equal rows are kept
        whole = tl.split(tl.permute(tl.reshape(whole, (2, 8, M)), (1, 2, 0)))[0]
        sums = ()
        share = repeat_rows(whole * (-1.0 / (1 << BITS)), 4)
        for j in tl.static_range(SLABS):
            codes_ptr = words_ptr + j * SLAB_WORDS + CODES
            mode = tl.load(halves_ptr + j * SLAB_WORDS * 2 + SCALE + group * 32 + own).to(tl.float32)
            slot = tl.load(words_ptr + j * SLAB_WORDS + SLOT + group * 32 + own)
            symmetric = mode < 0
            zero = tl.where(symmetric, 0.0, slot.to(tl.float32, bitcast=True))
            signs = tl.where(symmetric, slot, -1)
            part = repeat_rows(whole, 4)
            for at in tl.static_range(group * 2 * half, group * 2 * half + half):
                first, second = signed_pair(
                    chunk_words(codes_ptr, at, width, CHUNK), chunk_words(codes_ptr, at + half, width, CHUNK),
                    signs, full, at * CHUNK // width, (at + half) * CHUNK // width, at % half * CHUNK // 4, BITS
                )  # fmt: skip
                part = tl.dot(second, x[at % half + half], tl.dot(first, x[at % half], part))
            part = scores[j] + part * fragment_rows(tl.abs(mode), M)
            sums = sums + (part + share * fragment_rows(zero, M),)
        scores = sums
    return scores

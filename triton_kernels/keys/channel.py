# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Scores (32 tokens in `fragment_index`, M) of one slab for the M rows of one KV head.

Queries come as one float16 operand per plane, q_p = q / top * 4^-(b p / 2) = q / top * 2^-(b p), where top is the
row's largest |q|: codes of plane p are 2^(b p) too large where they lie, and |q_p| <= 1 keeps every product with a
float16 scale finite. Scores are returned divided by top * 2^24, which the softmax multiplies back per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

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


@triton.constexpr_function
def key_shift(channel, d, hybrid, bits):
    """The number of bits by which a channel's codes (not PolarQuant's) are too large where they lie."""
    return signed_low(channel % 32 // 16, bits) if hybrid else channel // (d * bits // 8) * bits


@triton.jit
def query_channel(at, R: tl.constexpr, K: tl.constexpr, INDEX: tl.constexpr, CHUNK: tl.constexpr):
    """Channels of query operand INDEX: a chunk of channels, or the x or the y of a chunk of pairs."""
    if K.polar:
        chunks: tl.constexpr = R.d // 2 // CHUNK
        pair = INDEX % chunks * CHUNK + at
        if K.interleaved:
            inside = 2 * pair + INDEX // chunks
        else:
            inside = pair + INDEX // chunks * (K.rotary // 2)
        # pairs outside RoPE, as in formats/methods/polar.py
        outside = K.rotary // 2 + pair + INDEX // chunks * ((R.d - K.rotary) // 2)
        return tl.where(pair < K.rotary // 2, inside, outside)
    else:
        return INDEX * CHUNK + at


@triton.jit
def channel_scores(q, words_ptr, halves_ptr, R: tl.constexpr, K: tl.constexpr, SLABS: tl.constexpr, M: tl.constexpr):
    """SQuat and KIVI: k = zero_c + scale_c code, so

        s = sum_c (q_c scale_c) code_c + sum_c q_c zero_c

    The scale goes into the query once per slab, the zero into one number per row. With boosted channels a
    scale's sign has another meaning (boosted.py).
    """
    tl.static_assert(SLABS <= 2)
    width: tl.constexpr = R.d * K.bits // 8
    chunks: tl.constexpr = width // K.chunk  # of a plane
    planes: tl.constexpr = 8 // K.bits
    channel = fragment_channels(M)
    # the zeros' sums are also a product, with equal rows: eight for the first slab, eight for the last
    lane = fragment_channels(8)
    zeros = halves_ptr + K.zero + lane
    bias = tl.full((16, M), 0.0, tl.float32)
    for p in tl.static_range(planes - 1, -1, -1):
        bias *= 1 << K.bits
        for c in tl.static_range(chunks):
            first = load_some(zeros + p * width + c * K.chunk, lane, K.chunk, 16)
            last = load_some(zeros + p * width + c * K.chunk + (SLABS - 1) * R.slab_words * 2, lane, K.chunk, 16)
            bias = tl.dot(left_rows(first, last), columns_of_lanes(q[p * chunks + c]), bias)
    bias = tl.split(tl.permute(tl.reshape(bias * (1.0 / SUBNORMAL), (2, 8, M)), (1, 2, 0)))
    scores = ()
    for j in tl.static_range(SLABS):
        sums = repeat_rows(bias[j], 4)
        for c in tl.static_range(chunks):
            words = chunk_words(words_ptr + j * R.slab_words + K.codes, c, width, K.chunk)
            for p in tl.static_range(planes):
                place = halves_ptr + j * R.slab_words * 2 + K.scale + p * width + c * K.chunk + channel
                scale = load_some(place, channel, K.chunk, 16)
                if K.boosted > 0:
                    scale = tl.abs(scale)
                scaled = product(columns_of_lanes(q[p * chunks + c]), columns_of_lanes(scale))
                sums = tl.dot(plane(words, p, K.bits), scaled, sums)
        scores = scores + (sums,)
    return scores


@triton.jit
def hybrid_scores(
    q,
    words_ptr,
    halves_ptr,
    page_ptr,
    full,
    R: tl.constexpr,
    K: tl.constexpr,
    SLABS: tl.constexpr,
    M: tl.constexpr,
):
    """InnerQ: k = norm_c (zero_tg + scale_tg (code' - 2^b)), per token and group, so

        s = sum_g (scale_tg (sum_c x_c code'_c - 2^b sum_c x_c) + zero_tg sum_c x_c),   x_c = q_c norm_c

    code' is the code with a sign bit on top: its own in a symmetric group, whose zero is 0, else always 1. So both
    modes are one product, which starts at -2^b sum_c x_c.
    """
    groups: tl.constexpr = R.d // 32
    width: tl.constexpr = R.d * K.bits // 8
    half: tl.constexpr = 16 // K.chunk
    own, lane = fragment_places(4), fragment_channels(M)
    scores = ()
    for _ in tl.static_range(SLABS):
        scores = scores + (tl.full((32, M), 0.0, tl.float32),)
    for group in tl.static_range(groups):  # outside the loop, to avoid keeping x for all groups
        x = ()
        whole = tl.full((16, M), 0.0, tl.float32)
        for i in tl.static_range(group * 2 * half, (group + 1) * 2 * half):
            x = x + (columns_of_lanes(q[i] * load_some(page_ptr + K.norm + i * K.chunk + lane, lane, K.chunk, 16)),)
            # -2^b, too large by the same factor as the codes
            top = -(1 << K.bits << key_shift(i * K.chunk, R.d, True, K.bits)) / SUBNORMAL
            whole = tl.dot(tl.full((16, 16), top, tl.float16), x[i - group * 2 * half], whole)
        # half of the equal rows are kept
        whole = tl.split(tl.permute(tl.reshape(whole, (2, 8, M)), (1, 2, 0)))[0]
        sums = ()
        share = repeat_rows(whole * (-1.0 / (1 << K.bits)), 4)
        for j in tl.static_range(SLABS):
            codes_ptr = words_ptr + j * R.slab_words + K.codes
            mode = tl.load(halves_ptr + j * R.slab_words * 2 + K.scale + group * 32 + own).to(tl.float32)
            slot = tl.load(words_ptr + j * R.slab_words + K.slot + group * 32 + own)
            symmetric = mode < 0
            zero = tl.where(symmetric, 0.0, slot.to(tl.float32, bitcast=True))
            signs = tl.where(symmetric, slot, -1)
            part = repeat_rows(whole, 4)
            for at in tl.static_range(group * 2 * half, group * 2 * half + half):
                first, second = signed_pair(
                    chunk_words(codes_ptr, at, width, K.chunk), chunk_words(codes_ptr, at + half, width, K.chunk),
                    signs, full, at * K.chunk // width, (at + half) * K.chunk // width, at % half * K.chunk // 4, K.bits
                )  # fmt: skip
                part = tl.dot(second, x[at % half + half], tl.dot(first, x[at % half], part))
            part = scores[j] + part * fragment_rows(tl.abs(mode), M)
            sums = sums + (part + share * fragment_rows(zero, M),)
        scores = sums
    return scores

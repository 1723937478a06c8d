"""Scores of one slab (32 tokens in `mma_order`) for the rows of one KV head.

Queries come as one float16 operand per plane, q_p = q / top * 4^-(b p / 2) = q / top * 2^-(b p), where top is the
row's largest |q|: codes of plane p are 2^(b p) too large where they lie, and |q_p| <= 1 keeps every product with a
float16 scale finite. `unit` is what a row's products with codes still have to be multiplied by, top * 2^24 and the
scale of the softmax (to base 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import SUBNORMAL, mma_order, plane, row_max


@triton.jit
def key_places(KP: tl.constexpr):
    """The channel in its plane of each of the KP places; from D BITS / 8 on there is none."""
    return mma_order(tl.arange(0, KP))


@triton.jit
def channel_scores(
    q,
    unit,
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
    place = CODES + quad[:, None] * 32 + token[None, :]
    if width == KP:
        words = tl.load(words_ptr + place)
    else:
        words = tl.load(words_ptr + place, mask=(quad < width // 4)[:, None], other=0)
    scores = tl.full((M, 32), 0.0, tl.float32)
    # the zeros' sum as a product too; its 8 columns are equal
    bias = tl.full((M, 8), 0.0, tl.float32)
    for p in tl.static_range(8 // BITS - 1, -1, -1):
        if width == KP:
            scale = tl.load(halves_ptr + SCALE + p * width + at)
            zero = tl.load(halves_ptr + ZERO + p * width + at)
        else:
            scale = tl.load(halves_ptr + SCALE + p * width + at, mask=at < width, other=0.0)
            zero = tl.load(halves_ptr + ZERO + p * width + at, mask=at < width, other=0.0)
        scores = tl.dot(q[p] * scale[None, :], plane(words, p, BITS), scores)
        bias = tl.dot(q[p], tl.broadcast_to(zero[:, None], (KP, 8)), bias * (1 << BITS))
    return scores * unit[:, None] + (row_max(bias) * unit * (1.0 / SUBNORMAL))[:, None]

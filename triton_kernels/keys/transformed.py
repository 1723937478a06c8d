# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Transformed keys (formats/methods/klt.py). A query's numbers for a head's slots are a product with the head's
constants, which is computed once per step, before `attend` (kernels/gpu/triton/transformed.py). So a query is here

    f_1 ... f_n   the n slots' numbers       f_(n + 1) ... f_(n + d)   those of e, which gives a slab's mean

A channel's codes are centred, and so is each digit of base 4: (4^n - 1) / 2 = sum_j 4^j 3/2. So

    q . k = scale_t sum_s f_s (digit_ts - 3/2) + sum_c f_(n + c) e_c
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import byte_scales, chunk_words, fragment_rows, lane_rows, plane
from vllm_kvq.triton_kernels.lang import SUBNORMAL, column_sum
from vllm_kvq.triton_kernels.turning import turned


@triton.jit
def transformed_middle(q, K: tl.constexpr):
    """(M,): -3/2 sum_s f_s, of the rounded operands, so that what rounding them does to codes it also does to their
    middle."""
    planes: tl.constexpr = 8 // K.bits
    chunks: tl.constexpr = K.slots * K.bits // 8 // K.chunk
    total = column_sum(q[0].to(tl.float32)) * 0.0
    for p in tl.static_range(planes):
        for c in tl.static_range(chunks):
            total += column_sum(q[p * chunks + c].to(tl.float32)) * (1 << K.bits * p)
    return total * (-1.5 / SUBNORMAL)


@triton.jit
def mean_numbers(q_row, real, unit, R: tl.constexpr, K: tl.constexpr):
    """(pairs, M) each, in the scores' unit: what a slab's cosines and sines are multiplied by."""
    half: tl.constexpr = R.d // 2
    pair = tl.arange(0, R.columns // 2)
    place = q_row[None, :] + (K.slots + pair)[:, None]
    inside = real[None, :] & (pair < half)[:, None]
    cos, sin = tl.load(place, mask=inside, other=0.0), tl.load(place + half, mask=inside, other=0.0)
    return cos / unit[None, :], sin / unit[None, :]


@triton.jit
def transformed_scores(
    q,
    middle,
    mean,
    turn_ptr,
    first,
    words_ptr,
    R: tl.constexpr,
    K: tl.constexpr,
    SLABS: tl.constexpr,
    M: tl.constexpr,
):
    """As in channel.py. q: right operands; middle (M,): the sum above, in the scores' unit; mean: `mean_numbers`;
    first: the number of the first slab."""
    planes: tl.constexpr = 8 // K.bits
    width: tl.constexpr = K.slots * K.bits // 8
    chunks: tl.constexpr = width // K.chunk
    scores = ()
    for j in tl.static_range(SLABS):
        sums = tl.broadcast_to(middle[None, :], (32, M))
        for c in tl.static_range(chunks):
            words = chunk_words(words_ptr + j * R.slab_words + K.codes, c, width, K.chunk)
            for p in tl.static_range(planes):
                sums = tl.dot(plane(words, p, K.bits), q[p * chunks + c], sums)
        scale = byte_scales(words_ptr + j * R.slab_words + K.scale, lane_rows(), tl.arange(0, 4)[None, :], True)
        cos, sin = turned(turn_ptr, first + j, tl.arange(0, R.columns // 2), R.d)
        of_slab = column_sum(mean[0] * cos[:, None] + mean[1] * sin[:, None])
        scores = scores + (sums * fragment_rows(scale.to(tl.float32), M) + of_slab[None, :],)
    return scores

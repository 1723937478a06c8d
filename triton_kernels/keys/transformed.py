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

from vllm_kvq.triton_kernels.fragments import byte_rows, chunk_words, fragment_rows, lane_rows, plane
from vllm_kvq.triton_kernels.lang import SUBNORMAL, column_sum
from vllm_kvq.triton_kernels.turning import turned

AHEAD: tl.constexpr = tl.constexpr(16)
"""Slabs whose means `attend` takes into account at once: the rows of a matrix product."""


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
def _precise_dot(x, y, total):
    """total + x @ y of finite float32. The matrix units keep 11 bits of an operand, so each comes in two parts."""
    a = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    b = (y.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    total = tl.dot(x - a, b, tl.dot(a, y - b, total, input_precision="tf32"), input_precision="tf32")
    return tl.dot(a, b, total, input_precision="tf32")


@triton.jit
def scores_of_means(
    q_row,
    real,
    unit,
    turn_ptr,
    slabs,
    pairs,
    R: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
):
    """(AHEAD, M): what the means of slabs with these numbers add to their tokens' scores, in the scores' unit. It is a
    product of the slabs' cosines and sines with the query's numbers for e.

    `pairs` is R.columns // 2. A compiler that knew it would unroll the loop, which needs too many registers.
    """
    half: tl.constexpr = R.d // 2
    total = tl.full((AHEAD, M), 0.0, tl.float32)
    for first in range(0, pairs, 8):
        pair = first + tl.arange(0, 8)
        cos, sin = turned(turn_ptr, slabs[:, None], pair[None, :], R.d)
        place = q_row[None, :] + (K.slots + pair)[:, None]
        inside = real[None, :] & (pair < half)[:, None]
        x, y = tl.load(place, mask=inside, other=0.0), tl.load(place + half, mask=inside, other=0.0)
        total = _precise_dot(sin, y, _precise_dot(cos, x, total))
    return total / unit[None, :]


@triton.jit
def transformed_scores(
    q,
    middle,
    means,
    first,
    words_ptr,
    R: tl.constexpr,
    K: tl.constexpr,
    SLABS: tl.constexpr,
    M: tl.constexpr,
):
    """As in channel.py. q: right operands; middle (M,): the sum above, in the scores' unit; means: `scores_of_means`,
    of which the first slab's is row `first`."""
    planes: tl.constexpr = 8 // K.bits
    width: tl.constexpr = K.slots * K.bits // 8
    chunks: tl.constexpr = width // K.chunk
    slab = tl.arange(0, AHEAD)[:, None]
    scores = ()
    for j in tl.static_range(SLABS):
        sums = tl.broadcast_to(middle[None, :], (32, M))
        for c in tl.static_range(chunks):
            words = chunk_words(words_ptr + j * R.slab_words + K.codes, c, width, K.chunk)
            for p in tl.static_range(planes):
                sums = tl.dot(plane(words, p, K.bits), q[p * chunks + c], sums)
        scale = byte_rows(tl.load(words_ptr + j * R.slab_words + K.scale + lane_rows())).to(tl.float32)
        of_slab = column_sum(tl.where(slab == first + j, means, 0.0))
        scores = scores + (sums * fragment_rows(scale, M) + of_slab[None, :],)
    return scores

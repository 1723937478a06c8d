# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Transformed keys (formats/methods/klt.py). Which numbers of a query belong to a head's slots is a product with the
head's constants, which is computed once per step before `attend` (kernels/gpu/transformed.py): a row of queries is here

    f_1 ... f_SLOTS   the slots' numbers       f_(SLOTS + 1) = q . mu

A channel's codes are centred, and so is each digit of base 4: (4^n - 1) / 2 = sum_j 4^j 3/2. So

    q . k = scale_t sum_s f_s (digit_ts - 3/2) + q . mu
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import chunk_words, fragment_places, fragment_rows, plane
from vllm_kvq.triton_kernels.lang import SUBNORMAL, column_sum


@triton.jit
def transformed_middle(q, SLOTS: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr):
    """(M,): -3/2 sum_s f_s, of the rounded operands, so that what rounding them does to codes it also does to their
    middle."""
    chunks: tl.constexpr = SLOTS * BITS // 8 // CHUNK
    total = column_sum(q[0].to(tl.float32)) * 0.0
    for p in tl.static_range(8 // BITS):
        for c in tl.static_range(chunks):
            total += column_sum(q[p * chunks + c].to(tl.float32)) * (1 << BITS * p)
    return total * (-1.5 / SUBNORMAL)


@triton.jit
def transformed_scores(
    q,
    middle,
    mean,
    words_ptr,
    halves_ptr,
    SLOTS: tl.constexpr,
    SLABS: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
):
    """As in channel.py. q: right operands; middle and mean (M,), the sum above and q . mu, in the scores' unit."""
    width: tl.constexpr = SLOTS * BITS // 8
    chunks: tl.constexpr = width // CHUNK
    scores = ()
    for j in tl.static_range(SLABS):
        sums = tl.broadcast_to(middle[None, :], (32, M))
        for c in tl.static_range(chunks):
            words = chunk_words(words_ptr + j * SLAB_WORDS + CODES, c, width, CHUNK)
            for p in tl.static_range(8 // BITS):
                sums = tl.dot(plane(words, p, BITS), q[p * chunks + c], sums)
        scale = tl.load(halves_ptr + j * SLAB_WORDS * 2 + SCALE + fragment_places(4)).to(tl.float32)
        scores = scores + (sums * fragment_rows(scale, M) + mean[None, :],)
    return scores

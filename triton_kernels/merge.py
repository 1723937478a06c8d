"""Joins partial attentions over disjoint tokens.

    o = sum_s exp(l_s - l) o_s,   l = log sum_s exp l_s

A row that no part saw gives 0 and -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import LOWEST


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    rows,
    parts,
    limit_ptr,
    HEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Parts (parts, rows, HEAD), dense -> (rows, HEAD) of any float type. Grid: (rows,).

    PARTS and COLUMNS are powers of two. With LIMITED, rows from LIMITED times the number at limit_ptr on are padding
    that no part has written: they become 0.
    """
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, COLUMNS)
    # split * rows + row can pass 2^31 / HEAD
    place = part.to(tl.int64) * rows + row
    there = part < parts
    if LIMITED:
        there = part < tl.where(row < tl.load(limit_ptr) * LIMITED, parts, 0)
    lse = tl.load(part_lse_ptr + place, mask=there, other=float("-inf"))
    top = tl.maximum(tl.reduce(lse, 0, tl.standard._elementwise_max), LOWEST)
    weight = tl.exp(lse - top)
    total = tl.reduce(weight, 0, tl.standard._sum_combine)
    inside = (there & (lse > LOWEST))[:, None] & (column < HEAD)[None, :]
    x = tl.load(part_ptr + place[:, None] * HEAD + column[None, :], mask=inside, other=0.0)
    o = tl.reduce(x * weight[:, None], 0, tl.standard._sum_combine) / tl.maximum(total, 1.0e-30)
    tl.store(out_ptr + row.to(tl.int64) * HEAD + column, o, mask=column < HEAD)
    tl.store(lse_ptr + row, tl.where(total > 0, top + tl.log(tl.maximum(total, 1.0e-30)), float("-inf")))

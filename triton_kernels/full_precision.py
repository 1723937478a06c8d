"""Attention over what a request keeps in full precision, read in place: sinks, ring, and the step's own tokens.

    tokens j of a request:   j < low                     sink pages, slot j
                             j < low + c - B             ring, position B + j - low
                             beyond (only with NEW)      the step's tokens, seen by themselves and by later ones

The output is one more part of the merge. With NEW = False the step's own tokens are left to a
kernel for prompts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import LN2, LOG2E, LOWEST, capped, row_max, row_sum
from vllm_kvq.triton_kernels.step import BOUNDARY, CONTEXT, COUNT, LOW, slot_offset


@triton.jit(do_not_specialize=["requests", "queries"])
def full_precision_kernel(
    plan_ptr,
    query_start_ptr,
    side_table_ptr,
    sink_table_ptr,
    side_ptr,
    sink_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    scale,
    requests,
    queries,
    side_row,
    sink_row,
    side_blocks,
    sink_blocks,
    side_elements,
    sink_elements,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    cap,
    R: tl.constexpr,
    C: tl.constexpr,
    SHARE: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    S: tl.constexpr,
    NEW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid: (requests * KV heads * tiles of M rows). `queries` is the largest number that a request has.

    WIDE: products in float32 for any type; the interpreter can't multiply bfloat16.
    """
    tiles = (queries * SHARE + M - 1) // M
    head = tl.program_id(0) // tiles % C.heads
    request = tl.program_id(0) // tiles // C.heads
    tile = tl.program_id(0) % tiles
    first = tl.load(query_start_ptr + request).to(tl.int32)
    mine = tl.load(query_start_ptr + request + 1).to(tl.int32) - first
    plan = plan_ptr + request
    count = tl.load(plan + COUNT * requests)
    context = tl.load(plan + CONTEXT * requests)
    boundary = tl.load(plan + BOUNDARY * requests)
    sinks = tl.load(plan + LOW * requests)

    row = tile * M + tl.arange(0, M)
    own = row // SHARE
    real = own < mine
    column = tl.arange(0, R.columns)
    whole = (first + own).to(tl.int64) * (C.heads * SHARE) + head * SHARE + row % SHARE
    q_row = query_ptr + (first + own).to(tl.int64) * query_token + (head * SHARE + row % SHARE) * query_head
    q = tl.load(q_row[:, None] + column[None, :], mask=real[:, None] & (column < R.head)[None, :], other=0.0)

    if WIDE:
        q = q.to(tl.float32)

    history = sinks + context - boundary
    total_tokens = tl.where((count > 0) & (tile * M < mine * SHARE), history, 0)
    if NEW:
        # the last row of this tile sees its own token and those before it
        last = tl.minimum((tile * M + M - 1) // SHARE + 1, count)
        total_tokens = tl.where((count > 0) & (tile * M < mine * SHARE), history + last, 0)
    best = tl.full((M,), LOWEST, tl.float32)
    total = tl.full((M,), 0.0, tl.float32)
    acc = tl.full((M, R.columns), 0.0, tl.float32)
    side_table, sink_table = side_table_ptr + request * side_row, sink_table_ptr + request * sink_row
    wide = (column < R.head)[None, :]
    for at in range(0, total_tokens, TOKENS):
        token = at + tl.arange(0, TOKENS)
        in_ring = (token >= sinks) & (token < history)
        slot = C.ring_at + (boundary + token - sinks) % C.ring
        ring, there = slot_offset(side_table, slot, in_ring, side_blocks, side_elements, C, C.slot)
        from_ring = side_ptr + (ring[:, None] + head * R.head + column[None, :])
        k = tl.load(from_ring, mask=there[:, None] & wide, other=0.0)
        v = tl.load(from_ring + C.heads * R.head, mask=there[:, None] & wide, other=0.0)
        known = there
        if S > 0:
            early, kept = slot_offset(sink_table, token, token < sinks, sink_blocks, sink_elements, C, C.slot)
            from_sinks = sink_ptr + (early[:, None] + head * R.head + column[None, :])
            k = tl.where(kept[:, None], tl.load(from_sinks, mask=kept[:, None] & wide, other=0.0), k)
            v = tl.where(kept[:, None], tl.load(from_sinks + C.heads * R.head, mask=kept[:, None] & wide, other=0.0), v)
            known = known | kept
        seen = tl.broadcast_to(known[None, :], (M, TOKENS))
        if NEW:
            newer = token - history
            late = (newer >= 0) & (newer < count)
            place = (first + newer).to(tl.int64)[:, None]
            k_new = tl.load(
                key_ptr + place * key_token + head * key_head + column[None, :], mask=late[:, None] & wide, other=0.0
            )
            v_new = tl.load(
                value_ptr + place * value_token + head * value_head + column[None, :],
                mask=late[:, None] & wide,
                other=0.0,
            )
            k, v = tl.where(late[:, None], k_new, k), tl.where(late[:, None], v_new, v)
            seen = seen | (late[None, :] & (newer[None, :] <= own[:, None]))
        if WIDE:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        if CAPPED:
            scores = capped(scores, cap * LOG2E)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(best, row_max(scores))
        decay = tl.exp2(best - new)
        weights = tl.exp2(scores - new[:, None])
        total = total * decay + row_sum(weights)
        best = new
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    norm = 1.0 / tl.maximum(total, 1.0e-30)
    tl.store(out_ptr + whole[:, None] * R.head + column[None, :], acc * norm[:, None], mask=real[:, None] & wide)
    lse = tl.where(total > 0, (best + tl.log2(tl.maximum(total, 1.0e-30))) * LN2, float("-inf"))
    tl.store(lse_ptr + whole, lse, mask=real)

# ruff: noqa: SIM102  (an `if` over constants must be separate: only then is its branch eliminated)
"""The first and last kernel of a layer's step: `begin` decides what happens to each request, `commit` keeps its tokens.

    begin    per request from query_start, seq_lens and the sidecar's header (kernels/torch/plan.py has the same rules):
             context c = length - q, start = c for a fresh (zero) header, boundary B = max(floor((c - W) / P) P, start);
             then the state of a new request (InnerQ's norm, QJL's energies, SQuat's subspace of a short prompt)
             and its sinks
    commit   the newest min(q, R) tokens into the ring, and the header

`begin` runs before packing and attention (packing/kernel.py, attend.py, full_precision.py and csrc/cuda/pack.h read its
plan), `commit` after them: what it overwrites in the ring is still read by a long chunk. Nothing is decided on the
host. A request is ignored when it has no new tokens, when one of its sidecar blocks is block 0 or out of range, and
when its header belongs to other tokens, which is counted as a fault.

A slot of a companion is one token's raw keys and values [2][heads][head]; slot s of a request lies in its block
s // per_block. From state_at on the slots hold the state in float32, from ring_at on the ring, position p at p % ring.
The header lies in the first block, behind its slots or in slot 0 (kernels/slots.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.kernels import slots
from vllm_kvq.triton_kernels.lang import clean, row_sum

HEADER: tl.constexpr = tl.constexpr(slots.MAGIC)

# rows of the plan, (8, requests) int32, which packing, attention and `commit` read
FIRST: tl.constexpr = tl.constexpr(0)
COUNT: tl.constexpr = tl.constexpr(1)  # new tokens; 0: ignore the request
CONTEXT: tl.constexpr = tl.constexpr(2)
START: tl.constexpr = tl.constexpr(3)
LOW: tl.constexpr = tl.constexpr(4)  # packed tokens [low, high) are attended
HIGH: tl.constexpr = tl.constexpr(5)
BOUNDARY: tl.constexpr = tl.constexpr(6)
FRESH: tl.constexpr = tl.constexpr(7)


@triton.jit
def slot_offset(table_ptr, slot, inside, blocks, block_stride, C: tl.constexpr, SIZE: tl.constexpr):
    """(int64 offset of a slot, whether it may be touched), in the unit of block_stride and SIZE, which is a slot's."""
    block = tl.load(table_ptr + slot // C.per_block, mask=inside, other=0).to(tl.int64)
    there = inside & (block > 0) & (block < blocks)
    return tl.where(there, block, 0) * block_stride + slot % C.per_block * SIZE, there


@triton.jit
def state_offset(table_ptr, index, inside, blocks, block_stride, C: tl.constexpr):
    """Float32 number `index` of a request's state, in float32 elements of the pool."""
    offset, there = slot_offset(table_ptr, C.state_at + index // C.words, inside, blocks, block_stride, C, C.words)
    return offset + index % C.words, there


@triton.jit
def load_state(state, index, inside, C: tl.constexpr):
    """Float32 numbers of a request's state, 0 outside. `state`: its sidecar's table, the pool, its blocks, and the
    float32 elements from one to the next."""
    table, floats, blocks, stride = state
    place, there = state_offset(table, index, inside, blocks, stride, C)
    return tl.load(floats + place, mask=there, other=0.0)


@triton.jit(do_not_specialize=["requests"])
def begin_kernel(
    query_start_ptr,
    seq_lens_ptr,
    side_table_ptr,
    sink_table_ptr,
    side_words_ptr,
    side_floats_ptr,
    sink_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    plan_ptr,
    faults_ptr,
    requests,
    side_row,
    sink_row,
    side_blocks,
    sink_blocks,
    side_words,
    sink_elements,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    R: tl.constexpr,
    C: tl.constexpr,
    SHARE: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    SPEC: tl.constexpr,
    NORM: tl.constexpr,
    ENERGY: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: (requests, KV heads). ROWS holds (1 + SPEC) SHARE queries."""
    request, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start_ptr + request).to(tl.int32)
    count = tl.load(query_start_ptr + request + 1).to(tl.int32) - first
    end = tl.load(seq_lens_ptr + request).to(tl.int32)
    context = end - count
    side_table = side_table_ptr + request * side_row
    ok = (count > 0) & (context >= 0)
    for i in range(C.sidecar_blocks):
        block = tl.load(side_table + i)
        ok = ok & (block > 0) & (block < side_blocks)
    header = side_words_ptr + tl.where(ok, tl.load(side_table), 0).to(tl.int64) * side_words + C.header
    magic, start, upcoming = tl.load(header), tl.load(header + 1), tl.load(header + 2)
    fresh = magic == 0
    start = tl.where(fresh, context, start)
    rewound = upcoming - context
    stale = ((magic != HEADER) | (rewound < 0) | (rewound > SPEC)) & (magic != 0)
    stale = ok & (stale | (start < 0) | (start > context) | (start % R.unit != 0))
    ok = ok & (stale == 0)
    boundary = tl.maximum(tl.maximum(context - W, 0) // R.unit * R.unit, start)
    low = tl.minimum(boundary, S)
    count = tl.where(ok, count, 0)
    if head == 0:
        plan = plan_ptr + request
        tl.store(plan + FIRST * requests, first)
        tl.store(plan + COUNT * requests, count)
        tl.store(plan + CONTEXT * requests, context)
        tl.store(plan + START * requests, start)
        tl.store(plan + LOW * requests, low)
        tl.store(plan + HIGH * requests, tl.where(ok, boundary, low))
        tl.store(plan + BOUNDARY * requests, boundary)
        tl.store(plan + FRESH * requests, fresh.to(tl.int32))
        if stale:
            tl.atomic_add(faults_ptr, 1)

    column = tl.arange(0, R.columns)
    if NORM or ENERGY:
        if (count > 0) & (fresh | (count > 1 + SPEC)):
            _of_keys(
                key_ptr + first.to(tl.int64) * key_token + head * key_head,
                side_table, side_floats_ptr, count, fresh, head, key_token, side_blocks, side_words,
                R, C, ENERGY,
            )  # fmt: skip
    if RANK > 0:
        if (count > 0) & (count <= 1 + SPEC) & fresh:
            row = tl.arange(0, ROWS)
            inside = (row < count * SHARE)[:, None] & (column < R.head)[None, :]
            place = (first + row // SHARE).to(tl.int64) * query_token + (head * SHARE + row % SHARE) * query_head
            x = clean(tl.load(query_ptr + place[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32))
            _subspace(
                x, side_table, side_floats_ptr, head, side_blocks, side_words,
                R, C, RANK, ROWS,
            )  # fmt: skip
    if S > 0:
        if (start == 0) & (context < S):
            sink_table = sink_table_ptr + request * sink_row
            for at in range(0, tl.minimum(count, S - context), 16):
                token = at + tl.arange(0, 16)
                slot = context + token
                mine = (token < count) & (slot < S)
                target, there = slot_offset(sink_table, slot, mine, sink_blocks, sink_elements, C, C.slot)
                inside = there[:, None] & (column < R.head)[None, :]
                row = (first + token).to(tl.int64)[:, None]
                target = sink_ptr + target[:, None] + head * R.head + column[None, :]
                k = tl.load(key_ptr + row * key_token + head * key_head + column[None, :], mask=inside, other=0.0)
                v = tl.load(value_ptr + row * value_token + head * value_head + column[None, :], mask=inside, other=0.0)
                tl.store(target, k, mask=inside)
                tl.store(target + C.heads * R.head, v, mask=inside)


@triton.jit
def _of_keys(
    key,
    side_table,
    side_floats_ptr,
    count,
    fresh,
    head,
    key_token,
    side_blocks,
    side_words,
    R: tl.constexpr,
    C: tl.constexpr,
    ENERGY: tl.constexpr,
):
    """State of the prompt so far: InnerQ's norm_c = sqrt(max_t |K_tc|), or QJL's sum_t K_tc^2 and its token count."""
    column = tl.arange(0, R.columns)
    found = tl.full((R.columns,), 0.0, tl.float32)
    tile: tl.constexpr = 8192 // R.columns  # one program goes through a whole chunk: few, large steps
    for at in range(0, count, tile):
        token = at + tl.arange(0, tile)
        inside = (token < count)[:, None] & (column < R.head)[None, :]
        x = clean(
            tl.load(key + token.to(tl.int64)[:, None] * key_token + column[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
        )
        if ENERGY:
            found += tl.reduce(x * x, 0, tl.standard._sum_combine)
        else:
            found = tl.maximum(found, tl.reduce(tl.abs(x), 0, tl.standard._elementwise_max))
    if ENERGY:
        first = head * 2 * R.d + column
        place, there = state_offset(side_table, first, column < R.d, side_blocks, side_words, C)
        before = tl.load(side_floats_ptr + place, mask=there, other=0.0)
        tl.store(side_floats_ptr + place, tl.where(fresh, found, before + found), mask=there)
        place, there = state_offset(side_table, first + R.d, column < R.d, side_blocks, side_words, C)
        before = tl.load(side_floats_ptr + place, mask=there, other=0.0)
        tl.store(side_floats_ptr + place, tl.where(fresh, 0.0, before) + count, mask=there)
    else:
        norm = tl.sqrt_rn(found)
        place, there = state_offset(side_table, head * R.d + column, column < R.d, side_blocks, side_words, C)
        before = tl.load(side_floats_ptr + place, mask=there, other=0.0)
        tl.store(side_floats_ptr + place, tl.where(fresh, norm, tl.maximum(before, norm)), mask=there)


@triton.jit
def _subspace(
    x,
    side_table,
    side_floats_ptr,
    head,
    side_blocks,
    side_words,
    R: tl.constexpr,
    C: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """SQuat's U = diag(S) V^T of a prompt that is as short as a decode step: few rows x (ROWS, columns).

    The leading left singular vector v comes from repeated squaring of x x^T; then u = v^T x, and v u^T is subtracted
    from x. What finally remains of x is the noise.
    """
    column = tl.arange(0, R.columns)
    i = tl.arange(0, ROWS)
    diagonal = i[:, None] == i[None, :]
    for rank in range(RANK):
        power = tl.dot(x, tl.trans(x), input_precision="ieee")
        for _ in range(10):
            trace = tl.reduce(row_sum(tl.where(diagonal, power, 0.0)), 0, tl.standard._sum_combine)
            power = power / tl.maximum(trace, 1.0e-30)
            power = tl.dot(power, power, input_precision="ieee")
        weight = row_sum(tl.where(diagonal, power, 0.0))
        best = tl.reduce(weight, 0, tl.standard._elementwise_max)
        chosen = tl.reduce(tl.where(weight == best, i, ROWS), 0, tl.standard._elementwise_min)
        v = row_sum(tl.where(i[None, :] == chosen, power, 0.0))
        v = v / tl.maximum(tl.sqrt_rn(tl.reduce(v * v, 0, tl.standard._sum_combine)), 1.0e-30)
        u = tl.reduce(v[:, None] * x, 0, tl.standard._sum_combine)
        x = x - v[:, None] * u[None, :]
        index = (head * (RANK + 1) + rank) * R.d + column
        place, there = state_offset(side_table, index, column < R.d, side_blocks, side_words, C)
        tl.store(side_floats_ptr + place, u, mask=there)
    noise = tl.reduce(row_sum(x * x), 0, tl.standard._sum_combine) / (R.head - RANK)
    index = (head * (RANK + 1) + RANK) * R.d + column
    place, there = state_offset(side_table, index, column < R.d, side_blocks, side_words, C)
    tl.store(side_floats_ptr + place, tl.where(column < R.d, noise, 0.0), mask=there)


@triton.jit(do_not_specialize=["requests"])
def commit_kernel(
    plan_ptr,
    side_table_ptr,
    side_words_ptr,
    side_ptr,
    key_ptr,
    value_ptr,
    requests,
    side_row,
    side_blocks,
    side_words,
    side_elements,
    key_token,
    key_head,
    value_token,
    value_head,
    R: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: (requests, tiles of TOKENS tokens, KV heads)."""
    request, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    plan = plan_ptr + request
    count = tl.load(plan + COUNT * requests)
    if count > 0:
        first, context = tl.load(plan + FIRST * requests), tl.load(plan + CONTEXT * requests)
        side_table = side_table_ptr + request * side_row
        token = tl.maximum(count - C.ring, 0) + tile * TOKENS + tl.arange(0, TOKENS)
        slot = C.ring_at + (context + token) % C.ring
        target, there = slot_offset(side_table, slot, token < count, side_blocks, side_elements, C, C.slot)
        column = tl.arange(0, R.columns)
        inside = there[:, None] & (column < R.head)[None, :]
        row = (first + token).to(tl.int64)[:, None]
        k = tl.load(key_ptr + row * key_token + head * key_head + column[None, :], mask=inside, other=0.0)
        v = tl.load(value_ptr + row * value_token + head * value_head + column[None, :], mask=inside, other=0.0)
        target = side_ptr + target[:, None] + head * R.head + column[None, :]
        tl.store(target, k, mask=inside)
        tl.store(target + C.heads * R.head, v, mask=inside)
        if (tile == 0) & (head == 0):
            header = side_words_ptr + tl.load(side_table).to(tl.int64) * side_words + C.header
            tl.store(header, HEADER)
            tl.store(header + 1, tl.load(plan + START * requests))
            tl.store(header + 2, context + count)


@triton.jit
def load_token(
    request,
    position,
    plan_ptr,
    requests,
    side_table_ptr,
    side_row,
    side_blocks,
    side_elements,
    C: tl.constexpr,
):
    """Locations of a request's tokens: (whether in the ring, offset there, row among the new tokens)."""
    context = tl.load(plan_ptr + CONTEXT * requests + request)
    first = tl.load(plan_ptr + FIRST * requests + request)
    old = position < context
    slot = C.ring_at + position % C.ring
    ring, there = slot_offset(side_table_ptr + request * side_row, slot, old, side_blocks, side_elements, C, C.slot)
    return there, ring, tl.where(old, 0, first + position - context).to(tl.int64)

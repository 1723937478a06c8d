"""Packs the units that a step completes: ring and chunk -> slabs, decided on the device.

One program packs one unit of P tokens of one KV head: the j-th that ends in (c, c + q]. It packs nothing if the request
has no such unit (`plan` of triton_kernels/step.py), or if the page is block 0 or out of range. Tokens before c come
from the ring, the others from the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.keys.channel import CHANNEL, HYBRID, POLAR
from vllm_kvq.triton_kernels.lang import MAGIC
from vllm_kvq.triton_kernels.packing.keys import channel_keys, hybrid_keys
from vllm_kvq.triton_kernels.packing.polar import polar_keys
from vllm_kvq.triton_kernels.packing.searched import searched_values, transformed_keys
from vllm_kvq.triton_kernels.packing.tile import boosted_keys, tile_values
from vllm_kvq.triton_kernels.packing.values import hybrid_values, token_values
from vllm_kvq.triton_kernels.step import CONTEXT, COUNT, load_token
from vllm_kvq.triton_kernels.values import TOKEN


@triton.jit(do_not_specialize=["requests", "units"])
def pack_kernel(
    plan_ptr,
    table_ptr,
    side_table_ptr,
    side_ptr,
    side_floats_ptr,
    key_ptr,
    value_ptr,
    words_ptr,
    halves_ptr,
    bytes_ptr,
    faults_ptr,
    forward_ptr,
    places_ptr,
    requests,
    units,
    table_row,
    table_width,
    side_row,
    pages,
    side_blocks,
    side_words,
    side_elements,
    key_token,
    key_head,
    value_token,
    value_head,
    page_words,
    head_words,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    SLABS: tl.constexpr,
    SLABS_AT: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    SPB: tl.constexpr,
    SLOT: tl.constexpr,
    WORDS: tl.constexpr,
    RING: tl.constexpr,
    RING_AT: tl.constexpr,
    KEYS: tl.constexpr,
    K_BITS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HIGH: tl.constexpr,
    BOOSTED: tl.constexpr,
    SLOTS: tl.constexpr,
    K_FITTED: tl.constexpr,
    K_RADIUS: tl.constexpr,
    K_NORM: tl.constexpr,
    K_NORMED: tl.constexpr,
    K_MODE: tl.constexpr,
    K_ANGLE0: tl.constexpr,
    K_ANGLE_STEP: tl.constexpr,
    K_RADIUS0: tl.constexpr,
    K_RADIUS_STEP: tl.constexpr,
    RANK: tl.constexpr,
    UPDATE: tl.constexpr,
    LAMBDA: tl.constexpr,
    FLOOR: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    PAPER: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUES: tl.constexpr,
    V_BITS: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_ROTATED: tl.constexpr,
    V_FITTED: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_MIDDLE: tl.constexpr,
    V_STEP: tl.constexpr,
    V_SEARCHED: tl.constexpr,
    V_MODE: tl.constexpr,
):
    """See the module. Grid: (requests * units, HEADS); `units` is the maximum that the longest chunk can complete.

    forward_ptr and places_ptr: transformed keys' tables (kernels/gpu/transformed.py).
    """
    request, head = tl.program_id(0) // units, tl.program_id(1)
    count = tl.load(plan_ptr + COUNT * requests + request)
    context = tl.load(plan_ptr + CONTEXT * requests + request)
    begun = context // UNIT
    unit = begun + tl.program_id(0) % units
    place = unit * UNIT // (SLABS * 32)
    due = (count > 0) & ((unit + 1) * UNIT <= context + count) & (place < table_width)
    page = tl.load(table_ptr + request * table_row + place, mask=due, other=0).to(tl.int64)
    if (page > 0) & (page < pages):
        record = page * page_words + head * head_words
        follows = place * (SLABS * 32) < begun * UNIT  # the page was started in an earlier step
        damage = tl.full((), 0, tl.int32)
        if KEYS == POLAR:
            all_tokens = unit * UNIT + tl.arange(0, TOKENS)
            all_ringed, all_ring, all_row = load_token(
                request, all_tokens, plan_ptr, requests, side_table_ptr, side_row, side_blocks, side_elements,
                SPB, SLOT, RING, RING_AT,
            )  # fmt: skip
            real = tl.arange(0, TOKENS) < UNIT
            all_old, all_new = side_ptr + all_ring + head * HEAD, key_ptr + all_row * key_token + head * key_head
            damage += polar_keys(
                (all_old, all_ringed & real, all_new, (all_ringed == 0) & real),
                words_ptr + record, halves_ptr + record * 2,
                HEAD, D, SLABS, SLABS_AT, SLAB_WORDS, K_BITS, RADIUS_BITS, PAPER, ROTARY, INTERLEAVED, K_BLOCK,
                K_CODES, K_RADIUS, K_ANGLE0, K_ANGLE_STEP, K_RADIUS0, K_RADIUS_STEP, TOKENS,
            )  # fmt: skip
        for i in range(UNIT // 32):
            nth = (unit * (UNIT // 32) + i) % SLABS
            base = record + SLABS_AT + nth * SLAB_WORDS
            slab = words_ptr + base, halves_ptr + base * 2
            position = unit * UNIT + i * 32 + tl.arange(0, 32)
            ringed, ring, row = load_token(
                request, position, plan_ptr, requests, side_table_ptr, side_row, side_blocks, side_elements,
                SPB, SLOT, RING, RING_AT,
            )  # fmt: skip
            fresh = position >= context
            k_ring, k_new = side_ptr + ring + head * HEAD, key_ptr + row * key_token + head * key_head
            v_ring, v_new = k_ring + HEADS * HEAD, value_ptr + row * value_token + head * value_head
            keys, values = (k_ring, ringed, k_new, fresh), (v_ring, ringed, v_new, fresh)
            state = side_table_ptr + request * side_row, side_floats_ptr, side_blocks, side_words
            if BOOSTED > 0:
                damage += boosted_keys(
                    keys, slab, state, head,
                    HEAD, D, COLUMNS, BOOSTED, K_FITTED, K_CODES, K_HIGH, K_SCALE, K_ZERO, RANK, UPDATE, LAMBDA, FLOOR,
                    SPB, WORDS,
                )  # fmt: skip
            elif KEYS == CHANNEL:
                damage += channel_keys(
                    keys, slab, state, head,
                    HEAD, D, K_BITS, K_BLOCK, K_FITTED, K_CODES, K_SCALE, K_ZERO, RANK, UPDATE, LAMBDA, FLOOR,
                    SPB, WORDS,
                )  # fmt: skip
            elif KEYS == HYBRID:
                damage += hybrid_keys(
                    keys, slab, halves_ptr + record * 2 + K_NORM, follows, state, head,
                    HEAD, D, K_BITS, K_BLOCK, K_CODES, K_SCALE, K_SLOT, SPB, WORDS,
                    K_MODE, K_NORMED,
                )  # fmt: skip
            elif SLOTS > 0:
                damage += transformed_keys(
                    keys, slab, forward_ptr + head * ((4 + D) * D), places_ptr + head * SLOTS,
                    HEAD, D, COLUMNS, SLOTS, K_BITS, K_CODES, K_SCALE,
                )  # fmt: skip
            if V_SEARCHED:
                damage += searched_values(
                    values, slab, HEAD, D, COLUMNS, V_BITS, V_ROTATED, V_STEP, V_MIDDLE, V_CODES, V_HIGH, V_SCALE,
                )  # fmt: skip
            elif V_ROTATED > 0 or V_FITTED:
                damage += tile_values(
                    values, slab, HEAD, D, COLUMNS, V_BITS, V_GROUP, V_ROTATED, V_FITTED, V_CODES, V_SCALE, V_ZERO,
                )  # fmt: skip
            elif VALUES == TOKEN:
                damage += token_values(
                    values, slab, HEAD, D, V_BITS, V_GROUP, V_BLOCK, V_CODES, V_SCALE, V_ZERO,
                )  # fmt: skip
            else:
                damage += hybrid_values(
                    values, slab, HEAD, D, V_BITS, V_BLOCK, V_CODES, V_SCALE, V_SLOT, V_MODE,
                )  # fmt: skip
            tl.store(bytes_ptr + record * 4 + 16 + nth, tl.full((), 1, tl.uint8))
        tl.store(words_ptr + record, MAGIC)
        if damage > 0:
            tl.atomic_add(faults_ptr + 1, damage)

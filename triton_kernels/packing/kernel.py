"""Packs the units that a step completes: ring and chunk -> slabs, decided on the device.

One program packs one unit of P tokens of one KV head: the j-th that ends in (c, c + q]. It packs nothing if the request
has no such unit (`plan` of triton_kernels/step.py), or if the page is block 0 or out of range. Tokens before c come
from the ring, the others from the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import MAGIC
from vllm_kvq.triton_kernels.packing.keys import channel_keys, hybrid_keys
from vllm_kvq.triton_kernels.packing.polar import polar_keys
from vllm_kvq.triton_kernels.packing.searched import searched_values, transformed_keys
from vllm_kvq.triton_kernels.packing.tile import boosted_keys, tile_values
from vllm_kvq.triton_kernels.packing.values import hybrid_values, token_values
from vllm_kvq.triton_kernels.step import CONTEXT, COUNT, load_token


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
    turn_ptr,
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
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
):
    """See the module. Grid: (requests * units, KV heads); `units` is the maximum that the longest chunk can complete.

    forward_ptr, places_ptr and turn_ptr: transformed keys' tables (kernels/gpu/triton/transformed.py).
    """
    request, head = tl.program_id(0) // units, tl.program_id(1)
    count = tl.load(plan_ptr + COUNT * requests + request)
    context = tl.load(plan_ptr + CONTEXT * requests + request)
    begun = context // R.unit
    unit = begun + tl.program_id(0) % units
    place = unit * R.unit // (R.slabs * 32)
    due = (count > 0) & ((unit + 1) * R.unit <= context + count) & (place < table_width)
    page = tl.load(table_ptr + request * table_row + place, mask=due, other=0).to(tl.int64)
    if (page > 0) & (page < pages):
        record = page * page_words + head * head_words
        follows = place * (R.slabs * 32) < begun * R.unit  # the page was started in an earlier step
        damage = tl.full((), 0, tl.int32)
        if K.polar:
            all_tokens = unit * R.unit + tl.arange(0, R.tokens)
            all_ringed, all_ring, all_row = load_token(
                request, all_tokens, plan_ptr, requests, side_table_ptr, side_row, side_blocks, side_elements, C
            )
            real = tl.arange(0, R.tokens) < R.unit
            all_old, all_new = side_ptr + all_ring + head * R.head, key_ptr + all_row * key_token + head * key_head
            all_sources = all_old, all_ringed & real, all_new, (all_ringed == 0) & real
            damage += polar_keys(all_sources, words_ptr + record, halves_ptr + record * 2, R, K)
        for i in range(R.unit // 32):
            nth = (unit * (R.unit // 32) + i) % R.slabs
            base = record + R.slabs_at + nth * R.slab_words
            slab = words_ptr + base, halves_ptr + base * 2
            position = unit * R.unit + i * 32 + tl.arange(0, 32)
            ringed, ring, row = load_token(
                request, position, plan_ptr, requests, side_table_ptr, side_row, side_blocks, side_elements, C
            )
            fresh = position >= context
            k_ring, k_new = side_ptr + ring + head * R.head, key_ptr + row * key_token + head * key_head
            v_ring, v_new = k_ring + C.heads * R.head, value_ptr + row * value_token + head * value_head
            keys, values = (k_ring, ringed, k_new, fresh), (v_ring, ringed, v_new, fresh)
            state = side_table_ptr + request * side_row, side_floats_ptr, side_blocks, side_words
            if K.boosted > 0:
                damage += boosted_keys(keys, slab, state, head, R, K, C)
            elif K.channel:
                damage += channel_keys(keys, slab, state, head, R, K, C)
            elif K.hybrid:
                damage += hybrid_keys(keys, slab, halves_ptr + record * 2 + K.norm, follows, state, head, R, K, C)
            elif K.transformed:
                table, slots = forward_ptr + head * ((3 + 2 * R.d) * R.d), places_ptr + head * K.slots
                number = unit * (R.unit // 32) + i
                damage += transformed_keys(keys, slab, number, table, slots, turn_ptr, R, K)
            if V.searched:
                damage += searched_values(values, slab, R, V)
            elif V.rotated > 0 or V.fitted:
                damage += tile_values(values, slab, R, V)
            elif V.by_token:
                damage += token_values(values, slab, R, V)
            else:
                damage += hybrid_values(values, slab, R, V)
            tl.store(bytes_ptr + record * 4 + 16 + nth, tl.full((), 1, tl.uint8))
        tl.store(words_ptr + record, MAGIC)
        if K.transformed:
            tl.store(words_ptr + record + 1, place * (R.slabs * 32))
        if damage > 0:
            tl.atomic_add(faults_ptr + 1, damage)

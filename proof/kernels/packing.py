"""Only the packing of one step by a GPU's kernel, for one request, without the rest of a layer's step."""

from __future__ import annotations

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.gpu.paged import PackSource, PagedKernels
from vllm_kvq.kernels.slots import SlotGeometry


def pack_like_a_step(
    kernels: PagedKernels,
    fmt: PageFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    context: int,
    state: torch.Tensor | None,
    device: str,
) -> tuple[torch.Tensor, int]:
    """One request's pages, after an unused page 0, and the number of elements that were replaced.

    Keys and values are (tokens, heads, head_size). Tokens before `context` lie in the ring, the others are the step's
    own. Slabs that end before `context` stay empty.
    """
    tokens, heads, _ = key.shape
    slots = SlotGeometry.of(fmt, heads, 0)
    pages = torch.zeros(1 + -(-tokens // fmt.N), heads, fmt.record_bytes, dtype=torch.uint8)
    elements = slots.slot_bytes // slots.itemsize
    held = torch.zeros(slots.sidecar_blocks * slots.slots_per_block, elements, dtype=key.dtype)
    if state is not None:
        raw = torch.zeros(slots.state_slots * slots.slot_bytes // 4)
        raw[: state.numel()] = state.flatten()
        held[slots.state_at : slots.ring_at] = raw.view(key.dtype).view(slots.state_slots, -1)
    for p in range(max(0, context - slots.ring), context):
        held[slots.ring_at + p % slots.ring] = torch.cat([key[p].flatten(), value[p].flatten()])
    side = torch.zeros(1 + slots.sidecar_blocks, slots.page_bytes // slots.itemsize, dtype=key.dtype)
    side[1:, : slots.slots_per_block * elements] = held.view(slots.sidecar_blocks, -1)
    plan = torch.tensor([[0], [tokens - context], [context], [0], [0], [0], [0], [0]], dtype=torch.int32)
    tables = [torch.arange(1, n, dtype=torch.int32)[None] for n in (len(pages), len(side))]
    faults = torch.zeros(2, dtype=torch.int32)
    new = key[context:], value[context:]
    plan, table, side_table, side, k, v, pages, faults = (
        x.to(device) for x in (plan, *tables, side, *new, pages, faults)
    )
    kernels.pack(fmt, slots, PackSource(plan, table, side_table, side, k, v, -(-len(k) // fmt.unit)), pages, faults)
    return pages.cpu(), int(faults[1])

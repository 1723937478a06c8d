"""What tests of kernels compare with: float64 attention over packed pages, and one packing step by itself."""

from __future__ import annotations

import torch

from vllm_kvq.formats import PageFormat

Exact = tuple[torch.Tensor, torch.Tensor]


def pack_like_a_step(
    fmt: PageFormat, key: torch.Tensor, value: torch.Tensor, context: int, state: torch.Tensor | None, device: str
) -> tuple[torch.Tensor, int]:
    """One request's pages as `cuda.pack` makes them, behind a page that is nobody's, and how many elements it replaced.

    Of key and value (tokens, heads, head_size) those before `context` lie in the ring, the others are the step's own.
    Slabs that end before `context` stay empty.
    """
    from vllm_kvq.kernels.gpu import cuda
    from vllm_kvq.kernels.slots import SlotGeometry

    tokens, heads, _ = key.shape
    slots = SlotGeometry.of(fmt, heads, 0)
    pages = torch.zeros(1 + -(-tokens // fmt.N), heads, fmt.record_bytes, dtype=torch.uint8)
    elements = slots.slot_bytes // slots.itemsize
    held = torch.zeros(slots.sidecar_blocks * slots.slots_per_block, elements, dtype=key.dtype)
    if state is not None:
        raw = torch.zeros(slots.state_slots * slots.slot_bytes // 4)
        raw[: state.numel()] = state.flatten()
        held[1 : 1 + slots.state_slots] = raw.view(key.dtype).view(slots.state_slots, -1)
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
    cuda.pack(fmt, slots, plan, table, side_table, side, k, v, pages, faults, -(-len(k) // fmt.unit))
    return pages.cpu(), int(faults[1])


def exact_attention(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
) -> Exact:
    """Float64 attention over the same codes; `table` as in `attend_table`, every page in [low, high) packed."""
    n, q, query_heads, d = query.shape
    heads = pages.shape[1]
    out = torch.zeros(n, q, query_heads, d, dtype=torch.float64)
    lse = torch.full((n, q, query_heads), -torch.inf, dtype=torch.float64)
    for i in range(n):
        first, last = int(low[i]), int(high[i])
        if last <= first:
            continue
        ids = table[i, first // fmt.N : -(-last // fmt.N)].long()
        fields = fmt.unpack(fmt.read(pages, ids))
        offset = first // fmt.N * fmt.N
        keys, values = (
            x.unflatten(0, (-1, heads)).transpose(0, 1).flatten(1, 2)[:, first - offset : last - offset, :d].double()
            for x in fields
        )
        rows = query[i].double().unflatten(1, (heads, -1)).permute(1, 0, 2, 3)  # (H, q, g, d)
        scores = torch.einsum("hqgd,htd->hqgt", rows, keys) * scale
        lse[i] = scores.logsumexp(-1).transpose(0, 1).flatten(1)
        got = torch.einsum("hqgt,htd->hqgd", scores.softmax(-1), values)
        out[i] = got.transpose(0, 1).flatten(1, 2)
    return out, lse


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))

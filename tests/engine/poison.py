"""Poison for what nobody may read, put into the real pool of a running engine (functions for `EngineProcess.call`)."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvq.formats.planes import SLAB

NAN = 0xFF


def packed_layers(engine: Any) -> list[Any]:
    """The PackedLayers of a TracedEngine."""
    layers = engine.engine.vllm_config.compilation_config.static_forward_context.values()
    found = [getattr(getattr(layer, "impl", None), "packed", None) for layer in layers]
    return [packed for packed in found if packed is not None]


class _Poisoned:
    """While a layer attends, all of its pool is poisoned that this step's positions do not call for."""

    def __init__(self, layer: Any, reach: int) -> None:
        self.layer, self.reach = layer, reach
        self.plan, self.attend = layer.plan, layer.attend
        layer.plan, layer.attend = self._plan, self._attend

    def _plan(self, batch: Any, plans: Any) -> Any:
        self.batch = batch
        return self.plan(batch, plans)

    def _attend(self, plan: Any, ring: Any, q: Any, k: Any, v: Any, kv_cache: torch.Tensor, output: Any) -> Any:
        pages = self.layer.pages(kv_cache)
        saved = pages.clone()
        start = plan.header[:, 1].tolist()
        pages.copy_(self._pool(saved, start))
        try:
            return self.attend(plan, ring, q, k, v, kv_cache, output)
        finally:
            pages.copy_(saved)

    def _pool(self, saved: torch.Tensor, start: list[int]) -> torch.Tensor:
        """The formula of the design, from the scheduler's numbers and not from the plan."""
        fmt, batch = self.layer.fmt, self.batch
        first_slab, size = fmt.slabs_at, fmt.slab_region.nbytes
        pool = torch.full_like(saved, NAN)
        own = torch.cat([torch.from_numpy(x).flatten().long() for x in (batch.sidecar, batch.sinks)])
        pool[own] = saved[own]
        slabs: set[tuple[int, int]] = set()
        for c, s, table in zip(batch.context.tolist(), start, batch.pages.tolist(), strict=True):
            boundary = max((c - fmt.W) // fmt.unit * fmt.unit, s, 0) - self.reach
            wanted = range((fmt.S + self.reach) // SLAB, max(boundary, 0) // SLAB)
            slabs |= {(table[a // fmt.slabs], a % fmt.slabs) for a in wanted}
        for page in {page for page, _ in slabs}:
            pool[page, :, :first_slab] = saved[page, :, :first_slab]
        for page, slab in slabs:
            at = slice(first_slab + slab * size, first_slab + (slab + 1) * size)
            pool[page, :, at] = saved[page, :, at]
        return pool


def poison_unread(engine: Any) -> None:
    """Packed copies of sinks and of the window, other requests' pages, sidecars and sinks, free blocks."""
    for layer in packed_layers(engine):
        _Poisoned(layer, 0)


def poison_too_much(engine: Any) -> None:
    """The control: poison reaches one slab too far at either end."""
    for layer in packed_layers(engine):
        _Poisoned(layer, SLAB)


def stop_poison(engine: Any) -> None:
    for layer in packed_layers(engine):
        for name in ("plan", "attend"):
            layer.__dict__.pop(name, None)


def poison_freed(engine: Any) -> int:
    """Blocks are filled with NaN patterns when nobody holds them any more, and again before they are handed out."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    caches = [layer.sidecar.kv_cache for layer in packed_layers(engine)]
    free, take = pool.free_blocks, pool.get_new_blocks

    def fill(blocks: Any) -> None:
        ids = torch.tensor([b.block_id for b in blocks if not b.is_null], dtype=torch.long)
        for cache in caches:
            cache.view(torch.uint8)[ids] = NAN

    def free_blocks(blocks: Any, *args: Any, **kwargs: Any) -> None:
        blocks = list(blocks)
        free(blocks, *args, **kwargs)
        # what is still in the prefix cache may be hit
        fill(b for b in blocks if b.ref_cnt == 0 and b.block_hash is None)

    def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
        blocks = take(*args, **kwargs)
        fill(blocks)
        return blocks

    pool.free_blocks, pool.get_new_blocks = free_blocks, get_new_blocks
    return len(caches)


def evict_sinks(engine: Any) -> int:
    """Drop all sink pages from the prefix cache, as if they had been evicted before the packed pages."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    from vllm_kvq.integration.spec import SinkSpec

    manager = engine.scheduler.kv_cache_manager
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    sinks = next(i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, SinkSpec))
    gone = 0
    for block in manager.block_pool.blocks:
        if block.block_hash is not None and get_group_id(block.block_hash) % (1 << 16) == sinks:
            gone += manager.block_pool._maybe_evict_cached_block(block)
    return gone

"""Poison for data that nobody may read, put into the real pool of a running engine (for `EngineProcess.call`)."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.kernels.cpu.step import CPUStep
from vllm_kvq.kernels.step import Caches, StepBatch
from vllm_kvq.kernels.torch.plan import Requests
from vllm_kvq.kernels.torch.step import Planned, PlannedStep

NAN = 0xFF


def packed_layers(engine: Any) -> list[Any]:
    """The PackedLayers of a TracedEngine."""
    layers = engine.engine.vllm_config.compilation_config.static_forward_context.values()
    found = [getattr(getattr(layer, "impl", None), "packed", None) for layer in layers]
    return [packed for packed in found if packed is not None]


def parts(layer: Any) -> tuple[PlannedStep, CPUStep]:
    """The two halves of a layer's step: the one planned on the host, and the decode step in one call."""
    return layer.step.planned, layer.step


class _Poisoned:
    """While a layer attends, everything in its pool that this step's positions do not need is poisoned."""

    def __init__(self, layer: Any, reach: int) -> None:
        self.layer, self.reach = layer, reach
        planned, step = parts(layer)
        self.plan, self.attend, self.decode = planned.plan, planned.attend, step.decode
        planned.plan, planned.attend, step.decode = self._plan, self._attend, self._decode

    def _plan(self, planned: Planned, caches: Caches) -> Any:
        self.requests = planned.requests
        return self.plan(planned, caches)

    def _attend(self, plan: Any, caches: Caches, *tensors: torch.Tensor) -> Any:
        pages = caches.pages
        saved = pages.clone()
        start = plan.header[:, 1].tolist()
        pages.copy_(self._pool(saved, start))
        try:
            return self.attend(plan, caches, *tensors)
        finally:
            pages.copy_(saved)

    def _decode(self, batch: StepBatch, caches: Caches, *tensors: torch.Tensor) -> int | None:
        """Such a step packs, too: what it may write stays as the step left it, and everything else as it was before."""
        self.requests = Requests.of(batch)
        headers = self.layer.sidecar.slots_geometry.headers(caches.sidecar)
        headers = headers[torch.from_numpy(self.requests.sidecar[:, 0]).long()]
        if (headers[:, 0] == 0).any():
            return self.decode(batch, caches, *tensors)
        pages, fmt = caches.pages, self.layer.fmt
        start = headers[:, 1].tolist()
        saved, done = pages.clone(), self._completed()
        poisoned = self._pool(saved, start)
        for page, _ in done:
            poisoned[page, :, : fmt.slabs_at] = saved[page, :, : fmt.slabs_at]
        pages.copy_(poisoned)
        try:
            return self.decode(batch, caches, *tensors)
        finally:
            own = self._own()
            saved[own] = pages[own]
            size = fmt.slab_region.nbytes * fmt.unit // SLAB
            for page, unit in done:
                for at in (slice(0, fmt.slabs_at), slice(fmt.slabs_at + unit * size, fmt.slabs_at + (unit + 1) * size)):
                    saved[page, :, at] = pages[page, :, at]
            pages.copy_(saved)

    def _completed(self) -> list[tuple[int, int]]:
        """(page, unit in it) that this step's tokens complete."""
        fmt, batch = self.layer.fmt, self.requests
        per_page = fmt.N // fmt.unit
        return [
            (int(table[unit // per_page]), unit % per_page)
            for c, new, table in zip(batch.context.tolist(), batch.new.tolist(), batch.pages, strict=True)
            for unit in range(c // fmt.unit, (c + new) // fmt.unit)
        ]

    def _own(self) -> torch.Tensor:
        return torch.cat([torch.from_numpy(x).flatten().long() for x in (self.requests.sidecar, self.requests.sinks)])

    def _pool(self, saved: torch.Tensor, start: list[int]) -> torch.Tensor:
        """Computed by the formula of the design, from the scheduler's numbers and not from the plan."""
        fmt, batch = self.layer.fmt, self.requests
        first_slab, size = fmt.slabs_at, fmt.slab_region.nbytes
        pool = torch.full_like(saved, NAN)
        own = self._own()
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
        for part in parts(layer):
            for name in ("plan", "attend", "decode"):
                part.__dict__.pop(name, None)


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

    from vllm_kvq.integration.core.spec import SinkSpec

    manager = engine.scheduler.kv_cache_manager
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    sinks = next(i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, SinkSpec))
    gone = 0
    for block in manager.block_pool.blocks:
        if block.block_hash is not None and get_group_id(block.block_hash) % (1 << 16) == sinks:
            gone += manager.block_pool._maybe_evict_cached_block(block)
    return gone

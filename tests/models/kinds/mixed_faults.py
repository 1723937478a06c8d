"""Faults for the fuzzer to find in models that mix kinds of layers, planted into a running engine."""

from __future__ import annotations

from typing import Any

import torch


def stale_window(engine: Any) -> None:
    """Every third block of a layer with a window keeps what its first owner wrote."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    config = engine.engine.vllm_config
    layers = config.compilation_config.static_forward_context
    windows = [
        layer
        for layer in layers.values()
        if hasattr(layer, "impl") and isinstance(layer.get_kv_cache_spec(config), SlidingWindowSpec)
    ]
    assert windows
    caches = [layer.kv_cache for layer in windows]
    first: list[dict[int, torch.Tensor]] = [{} for _ in windows]
    before = [cache.clone() for cache in caches]
    step = engine.engine.step

    def stepped() -> Any:
        out = step()
        for cache, old, kept in zip(caches, before, first, strict=True):
            for block in (cache != old).flatten(1).any(1).nonzero().flatten().tolist():
                if block % 3 == 0:
                    fresh = block not in kept or not old[block].any()
                    cache[block] = kept.setdefault(block, cache[block].clone()) if fresh else cache[block]
            old.copy_(cache)
        return out

    engine.engine.step = stepped


def dropped_sink(engine: Any) -> None:
    """The last head of packed layers has no learned sink."""
    layers = engine.engine.vllm_config.compilation_config.static_forward_context.values()
    found = [layer.impl.packed for layer in layers if getattr(getattr(layer, "impl", None), "packed", None) is not None]
    assert found
    for packed in found:
        packed.learned[-1] = float("-inf")


def kept_state(engine: Any) -> None:
    """A request that is admitted again after a preemption continues from its old state."""
    layers = engine.engine.vllm_config.compilation_config.static_forward_context.values()
    states = [tensor for layer in layers if hasattr(layer, "mamba_type") for tensor in layer.kv_cache]
    assert states
    group = next(group for group, beside in engine.beside.items() if beside.state)
    tables, schedule = engine.scheduler.kv_cache_manager.get_block_ids, engine.scheduler.schedule
    last: dict[str, list[torch.Tensor]] = {}
    blocks: dict[str, int] = {}

    def observed(*args: Any, **kwargs: Any) -> Any:
        # what the last step left, before any of its blocks is handed out again
        last.update({request: [tensor[block].clone() for tensor in states] for request, block in blocks.items()})
        out = schedule(*args, **kwargs)
        cached = out.scheduled_cached_reqs
        for request, context in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            table = tables(request)[group]
            if request in cached.resumed_req_ids and context and request in last:
                for tensor, kept in zip(states, last[request], strict=True):
                    tensor[table[context // engine.block_size - 1]] = kept
        blocks.clear()
        blocks.update({r: [b for b in tables(r)[group] if b][-1] for r in out.num_scheduled_tokens})
        return out

    engine.block_size = engine.scheduler.block_size
    engine.scheduler.schedule = observed

"""Pages in the prefix cache are never written again: whoever hits one reads what the first owner packed.

vLLM caches a block in the step that completes it. From the end of that step on its bytes stay as they are, until the
block is evicted: packed pages, and the sink pages that belong to them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch


class SharedPages:
    """Watches the cached pages of the requests that a step serves. No other page is in their block tables."""

    def __init__(self, engine: Any, scheduler: Any) -> None:
        self.pool, self.blocks_of = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager.get_block_ids
        layers = engine.vllm_config.compilation_config.static_forward_context
        groups = scheduler.kv_cache_config.kv_cache_groups
        self.caches = {i: found for i, g in enumerate(groups) if (found := _caches(layers, g.layer_names))}
        """By group. Layers of other processes are not in reach, and are not watched."""
        self.touched: set[tuple[int, int]] = set()
        """(group, block) in the tables of this step's requests."""
        self.known: dict[int, tuple[Any, int]] = {}
        """Block -> its name in the prefix cache, and the checksum of its bytes."""
        take = self.pool.get_new_blocks

        def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
            taken = take(*args, **kwargs)
            for block in taken:
                self.known.pop(block.block_id, None)
            return taken

        self.pool.get_new_blocks = get_new_blocks

    def scheduled(self, requests: Iterable[str]) -> None:
        """Before the step is computed."""
        tables = [self.blocks_of(request) for request in requests] if self.caches else []
        self.touched = {(group, block) for table in tables for group in self.caches for block in table[group]}

    def computed(self) -> list[str]:
        """After it: one line for each page that has changed."""
        changed = []
        for group, block in sorted(self.touched):
            name = self.pool.blocks[block].block_hash
            if name is None:
                self.known.pop(block, None)
                continue
            now = name, self._checksum(group, block)
            before = self.known.get(block, now)
            if before[0] == name and before != now:
                changed.append(f"block {block} of group {group} was written while it was in the prefix cache")
            self.known[block] = now
        self.touched = set()
        return changed

    def _checksum(self, group: int, block: int) -> int:
        found = 0
        for cache in self.caches[group]:
            found = zlib.crc32(cache[block].contiguous().view(torch.uint8).flatten().numpy(), found)
        return found


def _caches(layers: dict[str, Any], names: list[str]) -> list[torch.Tensor]:
    """The caches of a group's packed layers, or of their sinks."""
    from vllm_kvq.integration.worker.companions import Sinks

    def shared(layer: Any) -> bool:
        return isinstance(layer, Sinks) or getattr(getattr(layer, "impl", None), "packed", None) is not None

    return [layers[name].kv_cache for name in names if name in layers and shared(layers[name])]

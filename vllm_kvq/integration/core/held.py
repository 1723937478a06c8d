"""What the cache holds for the requests that run, counted in the engine core, where vLLM's scheduler hands out blocks.

It counts once a second, or less often where counting takes longer, and when the first request comes or the last one is
finished: a step costs nothing worth mentioning. Blocks that only the prefix cache still knows, free for whoever needs
them, are not counted, as in vLLM's own `kv_cache_usage_perc`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm_kvq.integration import metrics
from vllm_kvq.integration.core.manager import PackedManager, SidecarManager, SinkManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler

SECONDS = 1.0
LARGEST_SHARE = 0.0025
"""Share of the engine core's time. 256 requests of 32k tokens take 26 ms (Xeon with AVX-512): counted every 10 s."""


@dataclass(frozen=True)
class Held:
    packed: int
    """Tokens read from pages. A token in a prefix that requests share counts for each of them."""
    full_precision: int
    sidecar_bytes: int
    """With sink pages."""
    bits: float
    """Per cached number: the bits of all blocks in use, divided by the numbers in them; each token counts once."""


class Census:
    """Counts what one scheduler's requests hold. The groups of packed layers are alike, so one of them is looked at."""

    def __init__(self, scheduler: Scheduler) -> None:
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self.sidecars = next(m for m in managers if type(m) is SidecarManager)
        self.sinks = next((m for m in managers if type(m) is SinkManager), None)
        self.pages = next(m for m in managers if isinstance(m, PackedManager))
        self.series = metrics.Series.of(scheduler.vllm_config)
        self.next = 0.0

    def take(self, scheduler: Scheduler) -> None:
        """Export the counts if it is time."""
        now = time.monotonic()
        if scheduler.running and now < self.next:
            return
        began = time.thread_time()  # not the clock: a busy machine may interrupt this for a long time
        held = self.count([request.num_computed_tokens for request in scheduler.running])
        self.series.set_together(
            {
                metrics.PACKED: held.packed,
                metrics.FULL_PRECISION: held.full_precision,
                metrics.SIDECAR_BYTES: held.sidecar_bytes,
                metrics.BITS: held.bits,
            }
        )
        took = time.thread_time() - began
        # an idle engine's next request is counted at once
        self.next = now + max(SECONDS, took / LARGEST_SHARE) if scheduler.running else now

    def count(self, lengths: list[int]) -> Held:
        """What requests with this many tokens in the cache hold."""
        spec = self.sidecars.kv_cache_spec
        packed, tokens = sum(map(spec.packed_tokens, lengths)), sum(lengths)
        pages, shared = _distinct(self.pages.req_to_blocks.values())
        beside = _distinct(self.sidecars.req_to_blocks.values())[0]
        if self.sinks is not None:
            beside += _distinct(self.sinks.req_to_blocks.values())[0]
        # a shared page is full
        elements = (tokens - shared * spec.block_size) * spec.elements
        bits = 8 * (pages + beside) * spec.mean_page_bytes / elements if elements > 0 else 0.0
        return Held(packed, tokens - packed, round(beside * spec.mean_page_bytes * spec.copies), bits)


def _distinct(blocks: Iterable[list[KVCacheBlock]]) -> tuple[int, int]:
    """How many blocks requests hold, and how many more they would hold if none were shared."""
    every = [id(block) for block in chain.from_iterable(blocks)]
    found = len(set(every))
    return found, len(every) - found


_censuses: WeakKeyDictionary[Scheduler, Census | None] = WeakKeyDictionary()


def take_census(scheduler: Scheduler) -> None:
    """After a step of vLLM's scheduler; does nothing for one without a low-bit cache."""
    if scheduler not in _censuses:
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        ours = any(isinstance(manager, SidecarManager) for manager in managers)
        _censuses[scheduler] = Census(scheduler) if ours else None
    if (census := _censuses[scheduler]) is not None:
        census.take(scheduler)

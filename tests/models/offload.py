"""vLLM's CPU offloading where there is no GPU: blocks are copied at once, by PyTorch, in place of CUDA's streams."""

from __future__ import annotations

from typing import Any

import torch

COPIED = {"stored": 0, "loaded": 0}


class Done:
    """An event that has already happened."""

    def record(self, *stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Stream:
    def __init__(self, **how: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class Copier:
    """The interface of vLLM's DmaCopyBackend."""

    def init(self, pool: dict[str, Any], kept: dict[str, Any], *device: Any) -> None:
        self.pool, self.kept = pool, kept

    def launch_copy(
        self, source: list[int], target: list[int], is_store: bool, event_idx: int, events_list: list[Any], **wait: Any
    ) -> None:
        here, there = (self.pool, self.kept) if is_store else (self.kept, self.pool)
        for name in here:
            there[name][target] = here[name][source]
        COPIED["stored" if is_store else "loaded"] += len(source)
        events_list.append((event_idx, Done()))

    def shutdown(self) -> None:
        pass


def copy_at_once() -> None:
    """In this process, before an engine is made."""
    from vllm.v1.simple_kv_offload import worker

    from vllm_kvq.integration.plan import connectors

    connectors.can_copy = lambda platform: True
    worker.DmaCopyBackend, worker.PIN_MEMORY = Copier, False
    torch.cuda.Stream, torch.Event = Stream, Done
    torch.cuda.current_stream = lambda: None


def copied(engine: Any) -> dict[str, int]:
    """How many blocks, in the engine's process."""
    return dict(COPIED)

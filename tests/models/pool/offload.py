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
        Store.copier = self

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


Page = tuple[bytes, int | None, dict[str, torch.Tensor]]
"""A key, the tokens that vLLM notes with it, and the bytes of each pool."""


class Store:
    """What a store that several servers share would have: one engine's pages are taken out of its host memory, with
    their keys, and put into another's."""

    copier: Copier

    @staticmethod
    def take(traced: Any) -> list[Page]:
        pool, pages = _host_pool(traced), []
        for block in pool.blocks:
            if block.block_hash is not None:
                rows = {name: kept[block.block_id].clone() for name, kept in Store.copier.kept.items()}
                pages.append((block.block_hash, block.block_hash_num_tokens, rows))
        return pages

    @staticmethod
    def put(pages: list[Page], traced: Any) -> None:
        pool = _host_pool(traced)
        blocks = pool.get_new_blocks(len(pages))
        for block, (key, tokens, rows) in zip(blocks, pages, strict=True):
            for name, row in rows.items():
                Store.copier.kept[name][block.block_id] = row
            pool._insert_block_hash(key, block, num_tokens=tokens)
        pool.free_blocks(blocks)


def _host_pool(traced: Any) -> Any:
    return traced.engine.engine_core.engine_core.scheduler.connector.scheduler_manager.cpu_block_pool


def copy_at_once() -> None:
    """In this process, before an engine is made."""
    from vllm.v1.simple_kv_offload import worker

    from vllm_kvq.integration.plan import connectors

    connectors.can_copy = lambda platform: True
    worker.DmaCopyBackend, worker.PIN_MEMORY = Copier, False
    torch.cuda.Stream, torch.Event = Stream, Done
    torch.cuda.current_stream = lambda: None


def copied(engine: Any) -> dict[str, int]:
    """How many blocks were copied in the engine's process."""
    return dict(COPIED)

"""Pools beyond 4 GiB, of which only the blocks that are in use take memory.

A byte offset that is computed in 32 bits is right in every small pool. Here a request's blocks lie below 2 GiB, across
2 GiB, across 4 GiB and at the end of a pool that is larger, in turn.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

POOL_BYTES = 5 << 30
SPARSE_BYTES = 1 << 30
"""Tensors of zeros from this size on take no memory until they are written."""
MAP_NORESERVE = 0x4000
"""Linux refuses memory that exceeds the machine's, unless it is told not to reserve any. Python's mmap has no name for
this flag."""
BORDERS = (1 << 31, 1 << 32)


@contextmanager
def sparse_zeros() -> Iterator[None]:
    """Meanwhile `torch.zeros` of a large size on the CPU touches none of its memory."""
    import torch

    zeros = torch.zeros

    def sparse(*size: Any, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
        count = size[0] if len(size) == 1 and isinstance(size[0], int) else 0
        if count < SPARSE_BYTES or torch.device(device or "cpu").type != "cpu":
            return zeros(*size, dtype=dtype, device=device, **rest)
        kind = dtype or torch.get_default_dtype()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, count * kind.itemsize, flags=flags)
        return torch.frombuffer(memory, dtype=kind)

    torch.zeros = sparse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.zeros = zeros


def far_ids(count: int, blocks: int, block_bytes: int) -> list[int]:
    """`count` blocks of a pool of `blocks`, without block 0, which vLLM never hands out."""
    run = -(-count // (len(BORDERS) + 2))
    starts = [1, *(border // block_bytes - run // 2 for border in BORDERS), blocks - run]
    if any(b - a < run for a, b in pairwise(starts)):
        raise ValueError(f"a pool of {blocks} blocks of {block_bytes} bytes has no room for {count} that lie apart")
    runs = [range(start, start + run) for start in starts]
    return list(chain.from_iterable(zip(*runs, strict=True)))[:count]


def hand_out_only(pool: Any, ids: list[int]) -> None:
    """From now on vLLM's `BlockPool` consists of these blocks; all are free."""
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    pool.free_block_queue = FreeKVCacheBlockQueue([pool.blocks[i] for i in ids])
    pool.num_gpu_blocks = len(ids) + 1

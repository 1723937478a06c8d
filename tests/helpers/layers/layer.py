"""One layer's caches for a few requests, without a scheduler: each request has all blocks that it will ever need.

With `far` the pools are as large as a real server's: blocks lie below and above 2, 4, 8 and 16 GiB. Only what is
touched takes memory.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, Step, StepBatch

EDGES = (0, 1 << 31, 1 << 32, 1 << 33, 1 << 34)
"""Offsets in bytes: indices that wrap around at 2^31 bytes, float16 numbers or words lie beyond one of them."""

BEFORE = 1 << 33
"""Bytes in front of a pool, so that a negative offset reads zeros instead of foreign memory."""

LAYERS = 3
"""Layers that share a pool: vLLM lays the blocks of several layers side by side."""

NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on


def far_bytes(blocks: int, block_bytes: int) -> torch.Tensor:
    """(blocks, block bytes) uint8 zeros, the second layer's of `LAYERS`."""
    size = BEFORE + blocks * LAYERS * block_bytes
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    pool = torch.frombuffer(memory, dtype=torch.uint8)[BEFORE:].view(blocks, LAYERS, block_bytes)
    return pool[:, 1]


def far_ids(count: int, block_bytes: int) -> torch.Tensor:
    """Blocks around every boundary in turn."""
    first = [max(1, edge // (LAYERS * block_bytes)) for edge in EDGES]
    return torch.tensor([first[i % len(first)] + i // len(first) for i in range(count)], dtype=torch.int32)


@dataclass
class Layer:
    fmt: PageFormat
    requests: int = 1
    tokens: int = 256
    """The most tokens that a request will have."""
    heads: int = 2
    share: int = 2
    drafts: int = 0
    far: bool = False
    held: list[int] = field(default_factory=list, init=False)
    """Tokens of each request so far."""

    def __post_init__(self) -> None:
        fmt = self.fmt
        self.slots = SlotGeometry.of(fmt, self.heads, self.drafts)
        self.scale = fmt.geometry.head_size**-0.5
        cuts = [-(-self.tokens // fmt.N), self.slots.sidecar_blocks, self.slots.sink_blocks]
        count, size = self.requests * sum(cuts), self.slots.page_bytes
        ids = far_ids(count, size) if self.far else torch.arange(1, 1 + count, dtype=torch.int32)
        blocks = int(ids.max()) + 1
        bytes_ = [far_bytes(blocks, size) if self.far else torch.zeros(blocks, size, dtype=torch.uint8) for _ in "123"]
        pages, side, sinks = bytes_[0].unflatten(1, (self.heads, -1)), *(x.view(fmt.geometry.dtype) for x in bytes_[1:])
        self.caches = Caches(pages, side, sinks if fmt.S else None)
        self.tables = [x.contiguous() for x in ids.view(self.requests, -1).split(cuts, 1)]
        self.held = [0] * self.requests

    def batch(self, lengths: list[int]) -> StepBatch:
        """The next step, with that many new tokens for each request."""
        start = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
        seq = torch.tensor([held + new for held, new in zip(self.held, lengths, strict=True)], dtype=torch.int32)
        pages, side, sinks = self.tables
        return StepBatch(start, start, seq, pages, side, sinks if self.fmt.S else None, max(lengths))

    def random(self, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
        """Query, key and value for that many tokens."""
        rng, d = torch.Generator().manual_seed(seed), self.fmt.geometry.head_size
        shapes = ((tokens, heads, d) for heads in (self.heads * self.share, self.heads, self.heads))
        return tuple(torch.randn(shape, generator=rng).to(self.fmt.geometry.dtype) for shape in shapes)

    def run(self, step: Step, lengths: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        output = torch.full_like(query, 7.0)
        step.run(self.batch(lengths), self.caches, query, key, value, output)
        self.held = [held + new for held, new in zip(self.held, lengths, strict=True)]
        return output

    def hit(self, request: int, of: int, pages: int) -> None:
        """The new request finds another's first pages."""
        self.tables[0][request, :pages] = self.tables[0][of, :pages]
        self.tables[2][request] = self.tables[2][of]
        self.held[request] = pages * self.fmt.N

    def blocks(self, request: int) -> list[torch.Tensor]:
        """Copies of everything that the request has: pages, sidecar, sinks."""
        pools = (self.caches.pages, self.caches.sidecar, self.caches.sinks)
        tables = (table[request].long() for table in self.tables)
        return [
            pool[ids].flatten(1).view(torch.uint8) for pool, ids in zip(pools, tables, strict=True) if pool is not None
        ]

    def headers(self) -> torch.Tensor:
        """(requests, 3) int32: magic, first own position, next position."""
        return self.slots.headers(self.caches.sidecar)[self.tables[1][:, 0].long()]

    def put_headers(self, headers: torch.Tensor) -> None:
        self.slots.headers(self.caches.sidecar)[self.tables[1][:, 0].long()] = headers

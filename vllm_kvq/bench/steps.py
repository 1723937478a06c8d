"""The timed step: one decode step's attention in one layer, by vLLM's kernel and by ours, over equal histories.

Ours is complete, as the integration runs it: the check that all pages are packed, the pages, the full-precision
tokens in place (the newest `window` and the sinks), merged into the output. vLLM's is its CPU_ATTN over its own paged
cache. Neither writes the new token's own key and value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.bench import vllm_build
from vllm_kvq.bench.pools import calibrated, random_pages
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels.cpu.processor import last_level_cache
from vllm_kvq.kernels.paths import Wish, kernels_for
from vllm_kvq.kernels.torch.lists import PageList, TokenList

Step = Callable[[], object]
VLLM_BLOCK = 128
PACKED_TOKENS = 1024
"""Distinct tokens per head that are packed; the pool repeats them, because packing takes long."""


@dataclass(frozen=True)
class Shape:
    context: int
    batch: int
    query_heads: int
    heads: int
    head_size: int
    block_size: int
    rotate: int = 0
    """Caches that are read in turn, as those of a model's layers are; 0: as many as together exceed twice the
    processor's last-level cache, so that every step reads memory."""

    def __post_init__(self) -> None:
        if min(self.context, self.batch, self.heads, self.query_heads) < 1 or self.rotate < 0:
            raise ValueError("context, batch and heads must be at least 1, and rotated caches at least 0")
        if self.query_heads % self.heads:
            raise ValueError(f"{self.query_heads} query heads can't share {self.heads} KV heads evenly")

    def caches(self, nbytes: int) -> int:
        """How many caches of this size are read in turn."""
        return self.rotate or -(-2 * last_level_cache() // nbytes)

    @property
    def plain_bytes(self) -> int:
        """The size of one bf16 cache."""
        return self.batch * self.context * self.heads * self.head_size * 2 * 2

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


@dataclass(frozen=True)
class Candidate:
    """One step per rotated cache, and the bytes of cache that one step reads."""

    steps: list[Step]
    nbytes: int


def vllm_candidate(shape: Shape, cache_dtype: str) -> Candidate:
    vllm_build.load()
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    d, heads = shape.head_size, shape.heads
    blocks = shape.batch * -(-shape.context // VLLM_BLOCK)
    query = torch.randn(shape.batch, shape.query_heads, d, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32)
    sizes = (shape.batch, shape.query_heads, heads, d)
    isa = _get_attn_isa(torch.bfloat16, VLLM_BLOCK, d, cache_dtype)
    plan = ops.cpu_attn_get_scheduler_metadata(
        *sizes, lengths, torch.bfloat16, starts, True, -1, isa, True, None, cache_dtype
    )
    nbytes = blocks * heads * VLLM_BLOCK * 2 * d * (2 if cache_dtype == "auto" else 1)
    steps: list[Step] = []
    for _ in range(shape.caches(nbytes)):
        if cache_dtype == "auto":
            cache = torch.randn(blocks, heads, VLLM_BLOCK * 2, d).bfloat16()
        else:
            cache = torch.randint(0, 100, (blocks, heads, VLLM_BLOCK * 2, d), dtype=torch.uint8)
        key, value = cache.chunk(2, dim=2)
        table = torch.randperm(blocks, dtype=torch.int32).view(shape.batch, -1)

        def step(key: torch.Tensor = key, value: torch.Tensor = value, table: torch.Tensor = table) -> object:
            return ops.cpu_attention_with_kv_cache(
                *(query, key, value, out, starts, lengths, shape.scale, True, None, -1, table, 0.0, plan),
                *(None, None, 1.0, 1.0, cache_dtype),
            )

        steps.append(step)
    return Candidate(steps, nbytes)


def packed_pool(fmt: PageFormat, pages: int, heads: int) -> torch.Tensor:
    """`pages` records of random data per head."""
    some = max(1, PACKED_TOKENS // fmt.N)
    packed = random_pages(fmt, some, heads, 0)[1:]
    return packed.repeat(-(-pages // some), 1, 1)[:pages].contiguous()


def bound_format(shape: Shape, name: str, options: Mapping[str, Any] | None = None, layer: int = 0) -> PageFormat:
    """The format as a model's layer has it: with a sketch or constants that are in memory for this layer only."""
    geometry = Geometry(shape.head_size, shape.block_size, torch.bfloat16, layer)
    return calibrated(get_format(name).bind(geometry, options), shape.heads)


def kvq_candidate(shape: Shape, name: str, options: Mapping[str, Any] | None = None) -> Candidate:
    fmt = bound_format(shape, name, options)
    kernels = kernels_for(fmt, Wish.of("cpu", os.environ))
    # the tokens of a request of this length that are packed, and those in full precision
    boundary = max(0, (shape.context - fmt.W) // fmt.unit * fmt.unit)
    sinks = min(fmt.S, boundary)
    pages = -(-boundary // fmt.N)
    raw = sinks + shape.context - boundary
    query = torch.randn(shape.batch, 1, shape.query_heads, shape.head_size, dtype=torch.bfloat16)
    output = torch.empty(shape.batch, shape.query_heads, shape.head_size, dtype=torch.bfloat16)
    output_rows = torch.arange(shape.batch)[:, None]
    rows = torch.arange(shape.batch * raw).view(shape.batch, raw)
    seen = torch.ones(shape.batch, 1, raw, dtype=torch.bool)
    owner = torch.arange(shape.batch).repeat_interleave(pages)
    start = torch.arange(pages).repeat(shape.batch) * fmt.N
    low, high = (sinks - start).clamp_min(0), (boundary - start).clamp_max(fmt.N)
    first = packed_pool(fmt, max(1, shape.batch * pages), shape.heads)
    some = torch.randn(2, shape.batch, raw, shape.heads, shape.head_size).bfloat16()
    nbytes = shape.batch * pages * shape.heads * fmt.record_bytes + some.nbytes
    steps: list[Step] = []
    for nth in range(shape.caches(nbytes)):
        layer, pool, recent = bound_format(shape, name, options, nth), first.clone(), some.clone()
        ids = torch.randperm(shape.batch * pages)
        listed = PageList(ids, owner, low, high)
        held = TokenList((recent[0], recent[1]), (recent[0][:0], recent[1][:0]), rows, seen)

        def step(
            layer: PageFormat = layer, pool: torch.Tensor = pool, listed: PageList = listed, held: TokenList = held
        ) -> object:
            if not kernels.attend_step(layer, output, output_rows, query, pool, listed, held, shape.scale):
                raise RuntimeError("a page is not packed")
            return output

        steps.append(step)
    return Candidate(steps, nbytes)

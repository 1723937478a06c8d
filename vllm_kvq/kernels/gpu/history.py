"""What a long chunk of a prompt attends of its packed history: pages are unpacked once and attended as plain tokens.

The kernels for pages unpack a page again for every 16 rows, which suits decoding; a chunk of 8,192 tokens would unpack
its history 2,048 times. PyTorch, which unpacks here, is slow at it, so this pays only for long chunks. Steps with
prompts are not in CUDA graphs, so the host may read, once per step for all layers, where each request's packed tokens
lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.step import StepBatch, Whole
from vllm_kvq.kernels.torch.attend import Partial, join, read_slabs

ROWS = 16384
"""Queries times query heads of one KV head from which unpacking pays: 4,096 tokens of a Llama-3. docs/gpu.md has the
measurement."""
PIECE_BYTES = 128 << 20
"""Unpacked keys and values, in the model's type, that are attended at once."""
ROUND_BYTES = 16 << 20
"""Keys in float32 that are unpacked at once. Unpacking needs about eight times as much."""

COUNT, LOW, HIGH = 1, 4, 5  # rows of the plan: triton_kernels/step.py


@dataclass(frozen=True)
class Span:
    """The packed tokens [low, high) of a request, and where its queries lie among the step's tokens."""

    request: int
    first: int
    count: int
    low: int
    high: int

    @property
    def queries(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True, eq=False)
class History:
    """The requests of a step, from the first prompt on, whose history is unpacked."""

    spans: tuple[Span, ...]
    high: torch.Tensor
    """The limits of what the kernels for pages still attend of each prompt: 0 for the requests of `spans`."""
    others: bool
    """Whether they have anything left to attend."""

    @staticmethod
    def worthwhile(batch: StepBatch, first: int, share: int) -> bool:
        """Whether any chunk is long enough, as the host knows without waiting for the device."""
        return max(batch.lengths[first:]) * share >= ROWS

    @classmethod
    def of(
        cls, fmt: PageFormat, batch: StepBatch, pages: torch.Tensor, plan: torch.Tensor, first: int, share: int
    ) -> History:
        """Reads the plan, so the host waits for the device."""
        starts = batch.query_start.tolist()
        rows = enumerate(plan[:, first:].T.tolist(), first)
        every = [Span(i, starts[i], row[COUNT], row[LOW], row[HIGH]) for i, row in rows]
        found = [span for span in every if span.count and span.high > span.low]
        long = [span for span in found if span.count * share >= ROWS]
        # pages that were never packed, as in a warm-up, are for the kernels that skip them
        whole = [_packed(fmt, pages, batch.table[span.request], span) for span in long]
        sound = torch.stack(whole).tolist() if whole else []
        spans = tuple(span for span, is_sound in zip(long, sound, strict=True) if is_sound)
        high = plan[HIGH, first:]
        if spans:
            mine = {span.request for span in spans}
            keep = torch.tensor([i not in mine for i in range(first, batch.requests)], device=high.device)
            high = torch.where(keep, high, 0)
        return cls(spans, high, len(spans) < len(found))


def attend(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    span: Span,
    whole: Whole,
    scale: float,
    cap: float,
    faults: torch.Tensor,
) -> Partial:
    """A request's chunk (tokens, Hq, head_size) over its packed tokens. faults[0] counts rounds with a damaged page."""
    parts = (
        whole(query, key, value, scale, cap) for key, value in _pieces(fmt, pages, table, span, query.dtype, faults)
    )
    merged = next(parts)
    for part in parts:
        merged = join(merged, part)
    return merged


def _pieces(
    fmt: PageFormat, pages: torch.Tensor, table: torch.Tensor, span: Span, dtype: torch.dtype, faults: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (tokens, H, head_size) of the span, piece by piece."""
    heads, head = pages.shape[1], fmt.geometry.head_size
    per_page = 2 * heads * fmt.N * head * dtype.itemsize
    each = max(1, PIECE_BYTES // per_page)
    for at in range(span.low // fmt.N, -(-span.high // fmt.N), each):
        ids = table[at : min(at + each, -(-span.high // fmt.N))]
        both = _unpacked(fmt, pages, ids, dtype, faults)
        seen = slice(max(0, span.low - at * fmt.N), span.high - at * fmt.N)
        yield both[0][seen], both[1][seen]


def _unpacked(
    fmt: PageFormat, pages: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype, faults: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, head = pages.shape[1], fmt.geometry.head_size
    key, value = (torch.empty(len(ids), fmt.N, heads, head, dtype=dtype, device=pages.device) for _ in range(2))
    step = max(1, ROUND_BYTES // (4 * heads * fmt.N * fmt.geometry.d))
    for at in range(0, len(ids), step):
        mine = slice(at, at + step)
        page = _inside(pages, ids[mine])
        slabs = fmt.packed_slabs(pages, page) & (page > 0)[:, None]
        faults[0] += (~slabs).any()
        fields = read_slabs(fmt, pages, page, slabs)
        for target, x in zip((key, value), fmt.unpack(fields), strict=True):
            target[mine] = x[..., :head].unflatten(0, (-1, heads)).transpose(1, 2)
    return key.flatten(0, 1), value.flatten(0, 1)


def _packed(fmt: PageFormat, pages: torch.Tensor, table: torch.Tensor, span: Span) -> torch.Tensor:
    """Whether every slab of the span holds data, on the device."""
    ids = table[span.low // fmt.N : -(-span.high // fmt.N)]
    page = _inside(pages, ids)
    slab = torch.arange(fmt.slabs, device=ids.device) * (fmt.N // fmt.slabs)
    start = torch.arange(len(ids), device=ids.device)[:, None] * fmt.N + slab - span.low % fmt.N
    needed = (start < span.high - span.low) & (start + fmt.N // fmt.slabs > 0)
    return ((page > 0).all() & (fmt.packed_slabs(pages, page) | ~needed).all()).reshape(())


def _inside(pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Block numbers, 0 for those that are out of range."""
    return torch.where((ids > 0) & (ids < len(pages)), ids, 0).long()

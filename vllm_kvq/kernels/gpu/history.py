"""What a long chunk of a prompt attends of its packed history: pages are unpacked once and attended as plain tokens.

The kernels for pages unpack a page again for every 16 rows, which suits decoding; a chunk of 8,192 tokens would unpack
its history 2,048 times. Steps with prompts are not in CUDA graphs, so the host may read, once per step for all layers,
where each request's packed tokens lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.gpu.paged import PagedKernels
from vllm_kvq.kernels.step import StepBatch, Whole
from vllm_kvq.kernels.torch.attend import Partial, join

ROWS = 512
"""A chunk is long from this product of queries and query heads of one KV head on: 128 tokens of a Llama-3."""
WORK = 1 << 22
"""The least product of a long chunk's rows and its packed tokens for which unpacking pays. At that size the kernels for
pages take 200 us on an H200, more than a few launches and the host's wait."""
PIECE_BYTES = 128 << 20
"""Unpacked keys and values that are attended at once."""

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

    @property
    def tokens(self) -> int:
        return self.high - self.low

    def rows(self, share: int) -> int:
        return self.count * share


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
        long = [span for span in found if span.rows(share) >= ROWS and span.rows(share) * span.tokens >= WORK]
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
    kernels: PagedKernels,
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
    """A request's chunk (tokens, Hq, head_size) over its packed tokens. faults[0] counts slabs that are not packed."""
    heads, head = pages.shape[1], fmt.geometry.head_size
    first, end = span.low // fmt.N, -(-span.high // fmt.N)
    each = max(1, PIECE_BYTES // (2 * heads * fmt.N * head * query.element_size()))
    plain = query.new_empty(2, min(each, end - first) * fmt.N, heads, head)
    merged: Partial | None = None
    for at in range(first, end, each):
        ids = table[at : min(at + each, end)]
        seen = max(0, span.low - at * fmt.N), min(span.high - at * fmt.N, len(ids) * fmt.N)
        kernels.unpack(fmt, pages, ids, seen, (plain[0], plain[1]), faults)
        part = whole(query, plain[0, slice(*seen)], plain[1, slice(*seen)], scale, cap)
        merged = part if merged is None else join(merged, part)
    assert merged is not None, "an empty span"
    return merged


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

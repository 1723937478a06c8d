"""Tensors that belong together: the library takes each of these tuples as one argument (csrc/cpu/dispatch/tuples.h).

The names are compared with the library's when it is first used (kernels/cpu/layout.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_kvq.kernels.step import StepBatch
from vllm_kvq.kernels.torch import pack
from vllm_kvq.kernels.torch.lists import PageList, TokenList


class Pair(NamedTuple):
    """Keys and values (blocks, slots, H, head_size)."""

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, new: pack.Pair) -> Pair:
        """A step's new tokens (T, H, head_size), as blocks of one slot."""
        return cls(*(x.unsqueeze(1) for x in new))


class Held(NamedTuple):
    """A `TokenList`, whose pools are two pairs."""

    key: torch.Tensor
    value: torch.Tensor
    more_key: torch.Tensor
    more_value: torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor
    """Bytes."""

    @classmethod
    def of(cls, tokens: TokenList) -> Held:
        pool, more, rows, seen = tokens
        return cls(*pool, *more, rows, seen.contiguous().view(torch.uint8))


class Units(NamedTuple):
    """`kernels.torch.pack.Units`, as far as packing reads them."""

    page: torch.Tensor
    unit: torch.Tensor
    rows: torch.Tensor
    owner: torch.Tensor
    follows: torch.Tensor
    """Bytes."""
    position: torch.Tensor

    @classmethod
    def of(cls, units: pack.Units) -> Units:
        follows = units.follows.view(torch.uint8)
        return cls(units.page, units.unit, units.rows, units.owner, follows, units.position)


class Part(NamedTuple):
    """`kernels.torch.attend.Partial`, dense."""

    out: torch.Tensor
    lse: torch.Tensor


class Output(NamedTuple):
    """What an attention writes, (R, Hq, head_size), and which of its rows belongs to each (request, query)."""

    out: torch.Tensor
    rows: torch.Tensor


_NO_TABLE = torch.empty(0, dtype=torch.int32)


class Batch(NamedTuple):
    """A `StepBatch`, as far as decode steps read it."""

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    side_table: torch.Tensor
    sink_table: torch.Tensor
    """Empty if the format keeps no sinks."""

    @classmethod
    def of(cls, batch: StepBatch) -> Batch:
        sinks = _NO_TABLE if batch.sink_table is None else batch.sink_table
        return cls(batch.query_start, batch.seq_lens, batch.table, batch.side_table, sinks)


class Fresh(NamedTuple):
    """A step's new tokens: queries (T, Hq, head_size), and a pair, empty for a layer that shares another's caches."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Cached(NamedTuple):
    """A layer's `Caches`, as far as decode steps read them."""

    pages: torch.Tensor
    sidecar: torch.Tensor
    sinks: torch.Tensor
    """Without blocks if the format keeps no sinks."""


TUPLES = (PageList, Held, Units, Pair, Part, Output, Batch, Fresh, Cached)
"""In the library's order."""

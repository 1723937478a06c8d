"""One layer's step, the contract of all backends: its inputs, what it changes, its outputs.

    update    the step's new tokens go into pages (as units become complete), sink pages and the sidecar
    attend    every new token attends sinks, packed pages, the recent tokens and the new ones up to itself

The caches of all requests are updated before the first one is attended: a request may hit a page that another one
completes in this very step. `kernels/paths.py` chooses from three implementations:

    torch/step.py    planned on the host, PyTorch kernels; the reference for the others
    cpu/step.py      C++: a decode step in one call, all others planned like PyTorch's
    gpu/step.py      Triton and CUDA: nothing is decided on the host
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

D = TypeVar("D", covariant=True)


class Derived(Protocol[D]):
    """A class whose instances are made from a batch."""

    def of(self, batch: StepBatch) -> D: ...


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The requests of one step as vLLM hands them over: int32, the same for all layers of the model.

    Rows without new tokens, or with block 0 as their sidecar, are padding.
    """

    query_start: torch.Tensor
    """(requests + 1,) on the host: request i has the rows [query_start[i], query_start[i + 1]) of the step's tokens."""
    device_start: torch.Tensor
    """The same on the device."""
    seq_lens: torch.Tensor
    """(requests,) tokens of each request, its new ones included."""
    table: torch.Tensor
    """(requests, pages) packed pages."""
    side_table: torch.Tensor
    """(requests, blocks) blocks of the sidecars."""
    sink_table: torch.Tensor | None
    """(requests, blocks) sink pages; None if the format keeps no sinks."""
    longest: int
    """The largest number of new tokens of any request."""
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What steps have derived from this batch, by its type: created by one layer, used by all."""

    def derived(self, kind: Derived[D]) -> D:
        """`kind.of(self)`, created once."""
        found = self.kept.get(kind)
        if found is None:
            found = self.kept[kind] = kind.of(self)
        return found

    @property
    def requests(self) -> int:
        return len(self.seq_lens)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The requests' new tokens as known to the host: upper bounds if the device shortens drafts by itself."""
        return tuple(self.query_start.diff()[: self.requests].tolist())


@dataclass(eq=False)
class Caches:
    """One layer's caches as vLLM holds them in this step, and its learned sinks; a step keeps none of them."""

    pages: torch.Tensor
    """(blocks, H, record bytes) uint8."""
    sidecar: torch.Tensor
    """(blocks, elements) of the model's dtype, the last dimension dense; laid out as in kernels/slots.py."""
    sinks: torch.Tensor | None
    """Like `sidecar`; None if the format keeps no sinks."""
    learned: torch.Tensor | None = None
    """(Hq,) learned attention sinks, a weight of the layer: the scores of a virtual token that every query sees and
    whose value is 0. None if the model has none."""
    readers: int = 0
    """Layers without a cache of their own that are still to attend these ones in this step (`Step.share`)."""
    shared: Any = None
    """What `run` leaves for them, because later tokens overwrite it or vLLM may reuse its memory."""

    def read(self) -> bool:
        """Count one reader that has attended; returns whether it was the last."""
        self.readers -= 1
        if self.readers:
            return False
        self.shared = None
        return True


class Step(Protocol):
    def run(
        self,
        batch: StepBatch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> int:
        """query (T, Hq, head_size), key and value (T, H, head_size) -> output (T, Hq, head_size).

        Returns how many elements of keys and values were not finite or too large and were replaced before packing,
        as far as the host knows: on a GPU they are counted there (`GPUStep.faults`). Raises RuntimeError for a sidecar
        that belongs to other tokens and for a page that was never packed, IndexError for a block outside its cache.
        """

    def share(self, batch: StepBatch, caches: Caches, query: torch.Tensor, output: torch.Tensor) -> None:
        """Another layer's queries over what `run` attended in this step, its new tokens included, in the same parts,
        packed or not. `caches` are those passed to `run`.
        """


Causal = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""Causal attention among the new tokens of prompts: (query, key, value, start, lengths, scale, cap) -> (out, lse).

query (T, Hq, d), key and value (T, H, d): the prompts one after the other, with `lengths` tokens each; `start` has
their first rows and, last, the total number of rows, int32 on the device. out (T, Hq, d) and the log-sum-exp (T, Hq),
or None from a kernel that does not return it. `cap`: the soft cap of scores; 0: none."""

Whole = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, torch.Tensor]]
"""Attention of every query over every token: (query, key, value, scale, cap) -> (out, lse).

query (T, Hq, d), key and value (L, H, d) -> out (T, Hq, d) and the log-sum-exp (T, Hq)."""


@dataclass(frozen=True)
class Prompts:
    """The kernels that attend plain tokens in prompts."""

    causal: Causal
    whole: Whole | None = None

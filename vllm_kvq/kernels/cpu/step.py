"""A layer's step in C++: a decode step in one call (csrc/cpu/step/decode.h), all other steps planned on the host.

The single call needs no plan and no index tensors. It serves steps whose requests all have history and at most 1 +
speculative new tokens, in layers without learned sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.blame import blamed
from vllm_kvq.kernels.cpu import attend, pack
from vllm_kvq.kernels.cpu.call import all_threads, companions, scores
from vllm_kvq.kernels.cpu.layout import bind
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.tuples import Batch, Cached, Fresh
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, Causal, StepBatch
from vllm_kvq.kernels.torch.step import Kernels, Planned, PlannedStep

_NOT_DECODING = -1

CPU = Kernels(
    attend.attend_packed,
    attend.attend_raw,
    attend.attend_into,
    attend.attend_step,
    attend.all_packed,
    pack.pack,
    pack.store,
    pack.fit,
)


def why_not(fmt: PageFormat) -> str | None:
    """One sentence if C++ can't serve this format here, else None."""
    if library() is None:
        return "the C++ kernels can't be built here (see the log)"
    if bind(fmt) is not None:
        return None
    return f"{fmt.name} has no C++ kernels for its keys or values{blamed(fmt, lambda other: bind(other) is not None)}"


class CPUStep:
    """`kernels.step.Step` of one layer."""

    def __init__(
        self,
        fmt: PageFormat,
        slots: SlotGeometry,
        num_spec: int,
        scale: float,
        causal: Causal | None = None,
        all_queries: Callable[[torch.Tensor], torch.Tensor] | None = None,
        cap: float = 0.0,
    ) -> None:
        bound = bind(fmt)
        self._lib: Any = library()
        if bound is None or self._lib is None:
            raise ValueError(why_not(fmt))
        self._constants = (bound, companions(fmt, slots, num_spec))
        self._scores, self._most = scores(scale, cap), 1 + num_spec
        # created once: at short contexts the call dominates a decode step's cost
        self._no_sinks = torch.empty(0, slots.page_bytes // slots.itemsize, dtype=fmt.geometry.dtype)
        self._no_tokens = torch.empty(0, 1, slots.heads, slots.head_size, dtype=fmt.geometry.dtype)
        self.planned = PlannedStep(fmt, slots, num_spec, scale, torch.device("cpu"), CPU, causal, all_queries, cap)

    def run(
        self,
        batch: StepBatch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> int:
        # once a layer has found that this step needs a plan, the others need not check
        if batch.longest <= self._most and Planned not in batch.kept and caches.learned is None:
            replaced = self.decode(batch, caches, query, key, value, output)
            if replaced is not None:
                return replaced
        return self.planned.run(batch, caches, query, key, value, output)

    def share(self, batch: StepBatch, caches: Caches, query: torch.Tensor, output: torch.Tensor) -> None:
        if caches.shared is not None:
            self.planned.share(batch, caches, query, output)
            return
        # after a decode step the ring still holds everything that the step attended
        self.decode(batch, caches, query, None, None, output)
        caches.read()

    def decode(
        self,
        batch: StepBatch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
    ) -> int | None:
        """The number of elements replaced before packing; None, and nothing is done, if the step needs a plan.

        Without key and value, another layer has already updated the caches in this step: they are only attended.
        """
        if key is not None and len(key) != len(query):
            raise ValueError("query and key have different tokens")
        fresh = Fresh(query, *(self._no_tokens if x is None else x.unsqueeze(1) for x in (key, value)))
        cached = Cached(caches.pages, caches.sidecar, self._no_sinks if caches.sinks is None else caches.sinks)
        replaced = self._lib.decode_step(
            *self._constants, batch.derived(Batch), fresh, cached, output, self._scores, all_threads()
        )
        return None if replaced == _NOT_DECODING else int(replaced)

"""Layers that share an earlier layer's KV cache (Gemma-3n, small Gemma-4): they have only queries, and attend in every
step what that layer attended.

A step packs tokens and overwrites the ring before the sharing layers come, so what it attended is kept for them until
the last one has read it (`kernels.step.Step.share`). Layers with a sliding window that share stay vLLM's own business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.integration.plan.model.layers import Layers
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.worker.layer import PackedLayer, step_of
from vllm_kvq.kernels.step import Step, StepBatch
from vllm_kvq.problem import Refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SharingLayer:
    """One layer without a cache of its own."""

    def __init__(self, name: str, target: PackedLayer, step_for: Callable[[PageFormat], Step]) -> None:
        """`step_for`: the step that reads pages of this format."""
        self.name, self.target, self.step_for = name, target, step_for
        self.bind(target.fmt)
        target.readers.append(self.bind)

    @classmethod
    def create(
        cls, name: str, target: PackedLayer, scale: float, vllm_config: VllmConfig, served: Served, cap: float
    ) -> SharingLayer:
        slots, path = target.sidecar.slots_geometry, served.path
        step = functools.partial(step_of, slots=slots, scale=scale, vllm_config=vllm_config, path=path, cap=cap)
        return cls(name, target, step)

    def bind(self, fmt: PageFormat) -> None:
        self.step = self.step_for(fmt)

    def run(self, batch: StepBatch, query: torch.Tensor, output: torch.Tensor) -> None:
        caches = self.target.shared
        if caches is None:
            raise RuntimeError(f"{self.name}: {self.target.name}, whose KV cache it shares, has not run before it")
        self.step.share(batch, caches, query, output)


def check_sharing(index: int, impl: Any, target_name: str, target: Any, layers: Layers) -> None:
    """`impl` of the layer with this number and `target`, that of the layer whose cache it shares. Raises Refused."""
    if index not in layers.sharing:
        what = "that this model's configuration does not name"
    elif type(target) is not type(impl):
        what = f"of {target_name}, which is not packed"
    elif impl.learned is not None or target.learned is not None:
        what = "and have learned attention sinks"
    elif (impl.num_kv_heads, impl.head_size) != (target.num_kv_heads, target.head_size):
        what = "with other KV heads"
    else:
        return
    raise Refused(
        f"low-bit KV cache formats do not support layers that share a KV cache {what}; use --kv-cache-dtype auto"
    )

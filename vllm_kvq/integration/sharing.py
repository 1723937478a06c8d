"""Layers that share an earlier layer's KV cache (Gemma-3n, small Gemma-4): they have queries alone, and attend in every
step what that layer attended.

A step packs tokens and overwrites the ring before the sharing layers come, so what it attended is kept for them until
the last one has read it (`kernels.step.Step.share`). Layers with a sliding window that share stay vLLM's own business.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from vllm_kvq.integration.kept import Layers
from vllm_kvq.integration.layer import PackedLayer, step_of
from vllm_kvq.integration.validate import Refused
from vllm_kvq.kernels.step import Step, StepBatch


class SharingLayer:
    """One layer without a cache of its own."""

    def __init__(self, name: str, target: PackedLayer, step: Step) -> None:
        self.name, self.target, self.step = name, target, step
        target.readers += 1

    @classmethod
    def create(cls, name: str, target: PackedLayer, scale: float, vllm_config: Any, cap: float) -> SharingLayer:
        slots = target.sidecar.slots_geometry
        return cls(name, target, step_of(target.fmt, slots, scale, vllm_config, cap=cap))

    def run(self, batch: StepBatch, query: torch.Tensor, output: torch.Tensor) -> None:
        caches = self.target.shared
        if caches is None:
            raise RuntimeError(f"{self.name}: {self.target.name}, whose KV cache it shares, has not run before it")
        self.step.share(batch, caches, query, output)


def check_sharing(index: int, impl: Any, target_name: str, target: Any) -> None:
    """Of the layer with this number, its implementation and that of the layer whose cache it shares."""
    if index not in Layers.of(impl.vllm_config).sharing:
        what = "that this model's configuration does not name"
    elif type(target) is not type(impl):
        what = f"of {target_name}, which is not packed"
    elif impl.learned is not None or target.learned is not None:
        what = "beside learned attention sinks"
    elif (impl.num_kv_heads, impl.head_size) != (target.num_kv_heads, target.head_size):
        what = "with other KV heads"
    else:
        return
    raise Refused(
        f"low-bit KV cache formats do not support layers that share a KV cache {what}; use --kv-cache-dtype auto"
    )


class _WithSharing(dict[str, Any]):
    """A group's specs by layer. Sharing layers are found and not counted: they add nothing to a page."""

    def __init__(self, specs: dict[str, Any], shared: dict[str, str]) -> None:
        super().__init__(specs)
        self.shared = {name: target for name, target in shared.items() if target in specs}

    def __missing__(self, name: str) -> Any:
        return self[self.shared[name]]


RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
"""Modules that have imported vLLM's function; which of them are loaded depends on the model runner."""


def find_specs_of_sharing_layers() -> None:
    """Have vLLM's runners find the spec of a sharing layer in wrapped groups, too, once."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    for module in _loaded_runners():
        add = module.add_kv_sharing_layers_to_kv_cache_groups
        if getattr(add, "_kvq", False):
            continue

        @functools.wraps(add)
        def added(shared: dict[str, str], groups: list[Any], *more: Any, add: Any = add) -> None:
            add(shared, groups, *more)
            for group in groups:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    object.__setattr__(spec, "kv_cache_specs", _WithSharing(spec.kv_cache_specs, shared))

        added._kvq = True  # type: ignore[attr-defined]
        module.add_kv_sharing_layers_to_kv_cache_groups = added


def _loaded_runners() -> Iterator[Any]:
    return (sys.modules[name] for name in RUNNERS if name in sys.modules)

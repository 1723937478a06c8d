"""Which of vLLM's KV cache groups hold what: their block tables name the pages that a prefix hit finds."""

from __future__ import annotations

from typing import Any

from proof.oracle.trace import Beside


def groups_of(config: Any, layers: int) -> tuple[int, dict[int, Beside]]:
    """The group of the packed layers, or of those with full attention where none is packed; and by their numbers the
    groups of layers with a window or a state. The model has `layers` layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    specs = [_first(group.kv_cache_spec) for group in config.kv_cache_groups]
    # one group has all layers with full attention, and a packed one is its first
    full = next(i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec))
    beside = {
        i: _beside(group.layer_names, spec, layers)
        for i, (group, spec) in enumerate(zip(config.kv_cache_groups, specs, strict=True))
        if isinstance(spec, MambaSpec | SlidingWindowSpec)
    }
    return full, beside


def _first(spec: Any) -> Any:
    """The spec itself, or the first layer's where the layers of a group have a spec each."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _beside(names: list[str], spec: Any, layers: int) -> Beside:
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_cache_interface import MambaSpec

    # where a layer has attention and a state (Falcon-H1), vLLM numbers the states after all layers
    numbers = tuple(extract_layer_index(name) % layers for name in names)
    return Beside(numbers, isinstance(spec, MambaSpec), spec.block_size)

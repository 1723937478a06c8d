"""vLLM's runners find the spec of a layer that shares another's cache in wrapped groups, too.

vLLM adds such a layer to the group of the layer whose cache it shares. Where the specs of a group's layers are wrapped
in one (layout.py), it does not add the layer to that spec, in which it then looks the layer up. Which modules hold the
function depends on the model runner, so those that are loaded are changed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import is_loaded, once
from vllm_kvq.integration.patches.patch import SHARING, Moment, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADD = "add_kv_sharing_layers_to_kv_cache_groups"
RUNNERS = (f"vllm.v1.worker.gpu_model_runner:{ADD}", f"vllm.v1.worker.gpu.attn_utils:{ADD}")
"""Modules that have imported vLLM's function."""


class _WithSharing(dict[str, Any]):
    """A group's specs by layer. Sharing layers are found and not counted: they add nothing to a page."""

    def __init__(self, specs: dict[str, Any], shared: dict[str, str]) -> None:
        super().__init__(specs)
        self.shared = {name: target for name, target in shared.items() if target in specs}

    def __missing__(self, name: str) -> Any:
        return self[self.shared[name]]


def find_specs_of_sharing_layers(_: VllmConfig) -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    def make(add: Any) -> Any:
        @functools.wraps(add)
        def added(shared: dict[str, str], groups: list[Any], *more: Any) -> None:
            add(shared, groups, *more)
            for group in groups:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    object.__setattr__(spec, "kv_cache_specs", _WithSharing(spec.kv_cache_specs, shared))

        return added

    for name in filter(is_loaded, RUNNERS):
        once(name, make)


FOUND = Patch(
    what="add_kv_sharing_layers_to_kv_cache_groups wrapped in the model runners",
    why="a layer that shares a cache is put into its group, and not into the spec around the layers of that group",
    until="such a layer is put into both",
    needs=(f"vllm.v1.worker.utils:{ADD}", "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs.kv_cache_specs"),
    moment=Moment.LOADED,
    install=find_specs_of_sharing_layers,
    replaces=RUNNERS,
    only=SHARING,
)

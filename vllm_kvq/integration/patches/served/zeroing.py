"""New blocks are zeroed in groups whose layers vLLM has wrapped in one spec, too.

Where pages of several sizes lie side by side (layout.py), vLLM wraps the specs of a group's layers in one. The runner
for GPUs looks into it when it zeroes new blocks; the one for CPUs does not. A block is handed from one group to
another, and what a window layer finds past a request's end must not be NaN although its weight is 0.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Moment, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ZERO = "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids"


def zero_all_groups(_: VllmConfig) -> None:
    from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

    def make(zero: Any) -> Any:
        @functools.wraps(zero)
        def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
            zero(self, block_ids)
            for group in self.kv_cache_config.kv_cache_groups:
                spec = group.kv_cache_spec
                if not isinstance(spec, UniformTypeKVCacheSpecs) or not isinstance(spec.first_spec, AttentionSpec):
                    continue
                for name in group.layer_names:
                    self.compilation_config.static_forward_context[name].kv_cache[block_ids] = 0

        return _zero_block_ids

    once(ZERO, make)


ZEROED = Patch(
    what="CPUModelRunner._zero_block_ids wrapped",
    why="it skips groups with wrapped specs, which pages of several sizes have",
    until="it looks into wrapped specs",
    needs=(
        ZERO,
        "vllm.v1.kv_cache_interface:AttentionSpec",
        "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs.first_spec",
    ),
    moment=Moment.BUILT,
    install=zero_all_groups,
    replaces=(ZERO,),
    cpu_only=True,
)

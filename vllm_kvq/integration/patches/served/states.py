"""Two places where vLLM's handling of Mamba states does not fit a hybrid with packed layers.

vLLM starts the kernels that compute Mamba states when it meets a Mamba group, and skips groups whose layers it has
wrapped in one spec (layout.py). And on a CPU it crashes at the first long prompt of a Mamba-2 model: it takes a state
out of the middle of a chunk with a Triton kernel that a CPU does not have. There a prompt is cut where a state is to be
kept, as vLLM does for other kinds of states.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import HYBRIDS, Moment, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MIXER_SPEC = "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec"
BASE_SPEC = "vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec"
DISPATCH = "vllm.model_executor.layers.mamba.ops.ssu_dispatch"


def start_kernels(vllm_config: VllmConfig) -> None:
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend

    layers = vllm_config.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in layers if isinstance(layer, MambaBase)]
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    initialize_mamba_ssu_backend(vllm_config.mamba_config, groups, use_replayssm=vllm_config.cache_config.use_replayssm)


def _have_started() -> bool:
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    return ssu_dispatch._mamba_ssu_backend is not None


def leave_checkpoints_out(_: VllmConfig | None = None) -> None:
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    def make(own: Any) -> Any:
        @functools.wraps(own)
        def get_kv_cache_spec(self: Any, vllm_config: VllmConfig) -> Any:
            return MambaBase.get_kv_cache_spec(self, vllm_config)

        return get_kv_cache_spec

    once(MIXER_SPEC, make)


STARTED = Patch(
    what="initialize_mamba_ssu_backend called",
    why="it skips groups with wrapped specs",
    until="it looks into wrapped specs",
    needs=(f"{DISPATCH}:initialize_mamba_ssu_backend", BASE_SPEC),
    moment=Moment.BUILT,
    install=start_kernels,
    active=_have_started,
    only=HYBRIDS,
)
WITHOUT_CHECKPOINTS = Patch(
    what="MambaMixer2.get_kv_cache_spec replaced on a CPU",
    why="it keeps states out of the middle of a prompt's chunk with a kernel that a CPU does not have, "
    "and the engine crashes",
    until="a CPU has that kernel",
    needs=(MIXER_SPEC, BASE_SPEC),
    moment=Moment.LOADED,
    install=leave_checkpoints_out,
    replaces=(MIXER_SPEC,),
    only=HYBRIDS,
    cpu_only=True,
)

"""vLLM tells no layer that the whole model is loaded, which is when constants can be fitted to it.

It asks a worker how much memory is left for the cache. At that time the weights are there and the cache is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Moment, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GPU = "vllm.v1.worker.gpu_worker:Worker.determine_available_memory"
CPU = "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory"
ADAPTERS = "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras"
"""Tells vLLM that the text to which constants are fitted has no adapter."""
HOOK = "when_loaded"
"""The attribute of a layer of ours that wants to know (worker/companions.py)."""


def _tell_layers(own: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(own)
    def determine_available_memory(self: Any) -> int:
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            if (hook := getattr(layer, HOOK, None)) is not None:
                hook(self)
        return own(self)

    return determine_available_memory


def _patch(name: str, cpu_only: bool) -> Patch:
    def tell_layers(_: VllmConfig) -> None:
        once(name, _tell_layers)

    return Patch(
        what=f"{name.partition(':')[2]} wrapped",
        why="a calibrated format's constants are fitted to the loaded model, before its cache is sized",
        until="a backend is told that the model is loaded",
        needs=(name, ADAPTERS),
        moment=Moment.LOADED,
        install=tell_layers,
        replaces=(name,),
        cpu_only=cpu_only,
    )


ON_GPU, ON_CPU = _patch(GPU, False), _patch(CPU, True)

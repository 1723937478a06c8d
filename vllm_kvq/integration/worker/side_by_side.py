"""vLLM's CPU attention for layers that are not packed, next to packed ones."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvq.integration.worker.layout import SIDE_BY_SIDE

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


class SideBySideBuilder(CPUAttentionMetadataBuilder):
    """It is told these layers' dtype, not the model's: otherwise vLLM 0.33 would seek a processor that reads fp8."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        told = copy.copy(vllm_config)
        told.cache_config = copy.copy(vllm_config.cache_config)
        told.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, told, device)


class SideBySideBackend(CPUAttentionBackend):
    """It says that it reads pages that lie side by side. vLLM's own does so without saying so: tokens lie in a page as
    it wants them, and it takes the distance between pages from the tensor's strides."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return SIDE_BY_SIDE

    @staticmethod
    def get_builder_cls() -> type[SideBySideBuilder]:
        return SideBySideBuilder

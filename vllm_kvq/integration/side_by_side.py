"""vLLM's CPU attention for layers that stay in 16 bits beside packed ones."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvq.integration.layout import SIDE_BY_SIDE


class SideBySideBackend(CPUAttentionBackend):
    """It says that it reads pages that lie side by side. vLLM's own does so without saying it: tokens lie in a page as
    it wants them, and it takes the distance of pages from the tensor's strides."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return SIDE_BY_SIDE

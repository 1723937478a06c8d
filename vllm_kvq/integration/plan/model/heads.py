"""A layer's KV heads. Layers of one model may have different ones: in Gemma-4 those of layers with a sliding window are
smaller, and there may be more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Heads:
    """On one rank."""

    count: int
    size: int

    @property
    def elements(self) -> int:
        """Numbers per token, keys and values."""
        return 2 * self.count * self.size

    @classmethod
    def of(cls, vllm_config: VllmConfig, layer: int) -> Heads:
        model = vllm_config.model_config
        arch = model.model_arch_config[layer]
        return cls(model.get_num_kv_heads(vllm_config.parallel_config, arch), arch.head_size)

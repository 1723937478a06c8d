"""The backend of full-attention layers that the user keeps in 16 bits (`skip_layers`), on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_kvq.integration.windows import SMALLEST_BLOCK


class SixteenBitBackend(CPUAttentionBackend):
    """vLLM's CPU attention for a skipped full-attention layer: blocks that fit into our pages, padded to them."""

    page: ClassVar[int] = 0

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        block = cls.page // (spec.real_page_size_bytes // spec.block_size) // SMALLEST_BLOCK * SMALLEST_BLOCK
        return replace(spec, block_size=block, page_size_padded=cls.page)

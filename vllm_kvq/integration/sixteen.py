"""The backends of full-attention layers that stay in 16 bits, on the CPU: the user's `skip_layers`, and a draft's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_kvq.integration.windows import fitting_block


class SixteenBitBackend(CPUAttentionBackend):
    """vLLM's CPU attention for a skipped full-attention layer: blocks that fit into our pages, padded to them."""

    page: ClassVar[int] = 0

    aligned: ClassVar[bool] = False
    """Whether blocks have to divide ours."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        token_bytes = spec.real_page_size_bytes // spec.block_size
        block = fitting_block(cls.page, token_bytes, spec.block_size if cls.aligned else None)
        return replace(spec, block_size=block, page_size_padded=cls.page)


class DraftImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention. A draft model's layers are counted before the target's.

    vLLM's runner gives a draft model the block table of the first KV cache group, whichever that is, and groups are
    made in the order of layers. (EAGLE heads and MTP layers get their own group's, and MTP's have to be the last.)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_config = get_current_vllm_config()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.vllm_config.speculative_config.method != "draft_model":
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in [n for n, layer in layers.items() if not isinstance(getattr(layer, "impl", None), DraftImpl)]:
            layers[name] = layers.pop(name)


class DraftBackend(SixteenBitBackend):
    """The same for a draft's layers, whose blocks divide ours: a prefix hit is a multiple of both."""

    aligned = True

    @staticmethod
    def get_impl_cls() -> type[DraftImpl]:
        return DraftImpl

"""The backends of full-attention layers that stay in 16 bits, on the CPU: the user's `skip_layers`, and a draft's."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_kvq.integration.kept import fitting_block
from vllm_kvq.integration.setup import layer_of


class SixteenBitBackend(CPUAttentionBackend):
    """vLLM's CPU attention for a skipped full-attention layer: blocks that fit into our pages, padded to them."""

    page: ClassVar[int | None] = None
    """Bytes of our pages. Set in the subclass of each layer: `customize_spec` sees only the spec, without a vLLM
    configuration."""
    aligned: ClassVar[bool] = False
    """Whether blocks have to divide ours."""

    @staticmethod
    def get_impl_cls() -> type[SixteenBitImpl]:
        return SixteenBitImpl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if cls.page is None:
            raise RuntimeError("a layer in 16 bits was asked for its page size before its weights were loaded")
        token_bytes = spec.real_page_size_bytes // spec.block_size
        block = fitting_block(cls.page, token_bytes, spec.block_size if cls.aligned else None)
        return replace(spec, block_size=block, page_size_padded=cls.page)


class DraftBackend(SixteenBitBackend):
    """The same for a draft's layers, whose blocks divide ours: a prefix hit is a multiple of both."""

    aligned = True

    @staticmethod
    def get_impl_cls() -> type[DraftImpl]:
        return DraftImpl


@functools.cache
def padded_backend(backend: type[SixteenBitBackend], page: int) -> type[SixteenBitBackend]:
    return type(backend.__name__, (backend,), {"page": page, "__module__": __name__})


class SixteenBitImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, which gives its layer the page size that the configuration holds."""

    backend: ClassVar = SixteenBitBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_config = get_current_vllm_config()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        _, layer = layer_of(self.vllm_config, self)
        # in a draft's configuration, too, which has lost our format's name
        layer.attn_backend = padded_backend(self.backend, self.vllm_config.cache_config.skip_page_size_padded)


class DraftImpl(SixteenBitImpl):
    """The same for a layer of a draft. A draft model's layers are put before the target's.

    vLLM's runner gives a draft model the block table of the first KV cache group, whichever that is, and groups are
    made in the order of layers. (EAGLE heads and MTP layers get their own group's, and MTP's have to be the last.)
    """

    backend: ClassVar = DraftBackend

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.vllm_config.speculative_config.method != "draft_model":
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in [n for n, layer in layers.items() if not isinstance(getattr(layer, "impl", None), DraftImpl)]:
            layers[name] = layers.pop(name)

"""Speculative decoding with drafts that have a KV cache of their own: draft models, EAGLE heads, MTP layers.

Their layers stay in vLLM's own cache. What a draft reads decides how many guesses are right, never what is answered,
so its pages may be shared by prefix caching; and vLLM's proposer builds attention metadata only for the draft's own
layers, where our companions would be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.plan.model.layers import layer_types
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa")
WITH_CACHE = ("draft_model", "eagle", "eagle3", "mtp")


@dataclass(frozen=True)
class Draft:
    """A draft with a KV cache, in 16 bits (float32: 32)."""

    method: str
    layers: int
    heads: int
    """KV heads on this rank."""
    head_size: int
    itemsize: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Draft | None:
        """None where there is no draft or none with a cache."""
        spec = vllm_config.speculative_config
        if spec is None or spec.method not in WITH_CACHE:
            return None
        model = spec.draft_model_config
        heads = model.get_num_kv_heads(spec.draft_parallel_config)
        return cls(spec.method, _layers(spec), heads, model.get_head_size(), model.dtype.itemsize)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return 2 * self.heads * self.head_size * self.itemsize


def _layers(spec: SpeculativeConfig) -> int:
    config = spec.draft_model_config.hf_text_config
    return getattr(config, "n_predict", None) or 1 if spec.method == "mtp" else config.num_hidden_layers


def draft_problem(vllm_config: VllmConfig) -> Problem | None:
    """A way of drafting that does not work with a packed cache."""
    from vllm.platforms import current_platform

    spec = vllm_config.speculative_config
    if spec is None or spec.method in WITHOUT_CACHE:
        return None
    if spec.method not in WITH_CACHE:
        return Problem(
            f"speculative decoding with method {spec.method!r}",
            f"use one of {', '.join((*WITHOUT_CACHE, *WITH_CACHE))}",
        )
    if not current_platform.is_cpu():
        return Problem(f"speculative decoding with method {spec.method!r} on this platform", "use method 'ngram'")
    if spec.kv_cache_dtype in FORMATS:
        return Problem("a low-bit cache for the draft", "leave kv_cache_dtype out of the speculative config")
    model = spec.draft_model_config
    if model.use_mla:
        return Problem("drafts with latent attention (MLA)", "use method 'ngram'")
    if model.get_sliding_window() is not None or "sliding_attention" in layer_types(model):
        return Problem("drafts with sliding-window attention", "use another draft or method 'ngram'")
    return None


def is_draft(vllm_config: VllmConfig) -> bool:
    """Whether this configuration is the one that vLLM makes of ours to build a draft's layers.

    Its dtype is the draft's own, so our format's name is gone; but the model's layers are still in it.
    """
    from vllm.platforms import current_platform

    spec, layers = vllm_config.speculative_config, vllm_config.compilation_config.static_forward_context.values()
    return (
        current_platform.is_cpu()
        and spec is not None
        and spec.method in WITH_CACHE
        and vllm_config.cache_config.cache_dtype == spec.kv_cache_dtype
        and any(getattr(x, "kv_cache_dtype", None) in FORMATS for x in layers)
    )

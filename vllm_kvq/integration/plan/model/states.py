"""Hybrids: layers that keep a state of one size per request (Mamba-2, gated delta nets) next to packed ones.

The states stay as vLLM keeps them. They lie in KV cache groups of their own, whose pages are a whole state each, side
by side with the packed pages in a block of the pool (layout.py). patches/served/states.py mends what vLLM overlooks
about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from vllm_kvq.integration.plan.model.layers import layer_types
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

MAMBA_2, DELTA_NETS = "Mamba-2", "gated delta nets"
HYBRIDS = {
    "falcon_h1": MAMBA_2,
    "granitemoehybrid": MAMBA_2,
    "nemotron_h": MAMBA_2,
    "qwen3_next": DELTA_NETS,
}
"""Model types that have been tried, and what keeps their states."""


@dataclass(frozen=True)
class States:
    """The layers with a state, on one rank."""

    layers: int
    nbytes: int
    """Bytes of one state in one layer."""
    blocks: int
    """The most blocks that a request takes in each group of such layers, and what vLLM counts."""
    kept: int
    """What it takes, except while its prompt is computed or a page is completed."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> States | None:
        """None where there are none."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        if not model.is_hybrid:
            return None
        from vllm.model_executor.models import ModelRegistry
        from vllm.platforms import current_platform

        made, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
        shapes = made.get_mamba_state_shape_from_config(vllm_config)
        dtypes = made.get_mamba_state_dtype_from_config(vllm_config)
        nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        blocks = kept = 1 + vllm_config.num_speculative_tokens
        if cache.mamba_cache_mode == "align":  # with prefix caching a state is copied from block to block
            checkpoint = HYBRIDS.get(model.hf_text_config.model_type) == MAMBA_2 and not current_platform.is_cpu()
            blocks += 1 + checkpoint  # which patches/served/states.py takes away
        return cls(sum(map(has_state, layer_types(model))), nbytes, blocks, kept)


def has_state(kind: str) -> bool:
    return kind in ("mamba", "linear_attention", "hybrid")


def hybrid_problem(model: ModelConfig) -> Problem | None:
    """Why a model with such layers can't be served."""
    plain, kind = "use --kv-cache-dtype auto", model.hf_text_config.model_type
    if not model.is_hybrid:
        return Problem("models without attention layers", plain) if model.has_inner_state else None
    return None if kind in HYBRIDS else Problem(f"hybrid models of the type {kind!r}", plain)


def drafts_problem(vllm_config: VllmConfig) -> Problem | None:
    """Drafts that vLLM can't verify here: next to states it can do that only on GPUs."""
    from vllm.platforms import current_platform

    hybrid = vllm_config.model_config.is_hybrid
    if not hybrid or vllm_config.speculative_config is None or not current_platform.is_cpu():
        return None
    return Problem("speculative decoding in hybrid models on a CPU", "leave --speculative-config out")

"""What the configuration tells of RoPE, and which formats it stops: the model's own embeddings exist only in workers
(worker/binding.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvq.integration.plan.options import Options
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def no_rope(model: ModelConfig) -> str | None:
    """Why the configuration of this model tells nothing of RoPE."""
    config = model.hf_text_config.to_dict()
    rotated = any(value for key, value in config.items() if "rope" in key or "rotary" in key)
    # Granite 4 has RoPE's numbers whether it is used or not
    if not rotated or config.get("position_embedding_type", "rope") != "rope":
        return "the model has no RoPE"
    if model.using_transformers_backend():
        return "vLLM runs this model through Transformers, which does not say"
    return None


def pairing_problem(options: Options, model: ModelConfig) -> Problem | None:
    """Why the format can't know which channels RoPE pairs, as far as the configuration says."""
    settings = options.settings
    if not settings.keys.pairs_channels or settings.get("pairing") is not None:
        return None
    reason = no_rope(model)
    return None if reason is None else unknown_pairs(options.name, reason)


def unknown_pairs(name: str, reason: str) -> Problem:
    return Problem(
        f"{name} needs to know which channels RoPE rotates together and {reason}",
        "set the kvq option 'pairing' to 'half' or 'interleaved', or use kitty2",
    )

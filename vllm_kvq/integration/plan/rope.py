"""RoPE as the model applies it, for formats that store keys as they are before it: vLLM's table of cosines and sines.

An attention layer is given keys that RoPE has turned already. The rotary embeddings that the model has made say how:
their tables are taken, and each is compared with what its embedding does to a key, so that one which does something
else is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_kvq.formats.rope import Rope
from vllm_kvq.integration import compat

INSTEAD = "use squat2 or another format, which all store keys as they are after RoPE"


def no_rope(model: Any) -> str | None:
    """Why the configuration of this model tells nothing of RoPE."""
    config = model.hf_text_config.to_dict()
    rotated = any(value for key, value in config.items() if "rope" in key or "rotary" in key)
    # Granite 4 has RoPE's numbers whether it is used or not
    if not rotated or config.get("position_embedding_type", "rope") != "rope":
        return "the model has no RoPE"
    if model.using_transformers_backend():
        return "vLLM runs this model through Transformers, which does not tell"
    return None


def rope_problem(name: str, model: Any, windows: bool) -> str | None:
    """Why a format of this name can't take RoPE off this model's keys, as far as the configuration says.

    `windows`: whether some layers have a window, and the others may have another RoPE than those, or none.
    """
    reason = no_rope(model)
    if reason is None and model.uses_mrope:
        reason = "this model's rotations follow from more than a token's position (M-RoPE)"
    elif reason is None and (windows or 0 in (getattr(model.hf_text_config, "no_rope_layers", None) or ())):
        reason = "the layers of this model may differ in their RoPE, or have none"
    return None if reason is None else _sentence(name, reason)


def rope_of(name: str, head_size: int) -> Rope:
    """The RoPE of all heads of this size, for a format of this name; ValueError where there is none, or several."""
    found = compat.ropes(head_size)
    if len(found) != 1:
        raise ValueError(_sentence(name, f"the model has {len(found) or 'no'} kinds of RoPE for head size {head_size}"))
    rope = table_of(found[0])
    if rope is None:
        kind = type(found[0]).__name__
        raise ValueError(_sentence(name, f"this model's {kind} does not turn keys by a table of positions alone"))
    return rope


@functools.cache
def table_of(embedding: Any) -> Rope | None:
    """What a rotary embedding of vLLM's does to keys; None where it does something else than its table says."""
    table = getattr(embedding, "cos_sin_cache", None)
    if table is None:
        return None
    rope = Rope(table, compat.rope_style(embedding)[0])
    position = torch.tensor([0, 1, len(table) // 2, len(table) - 1], device=table.device)
    rng = torch.Generator().manual_seed(0)
    key = torch.randn(len(position), embedding.head_size, generator=rng, device="cpu").to(table)
    turned = embedding.forward_native(position, key.clone(), key.clone())[1].float()
    # rounded once on their side, to the model's dtype
    near = 4 * torch.finfo(table.dtype).eps * turned.abs().max()
    return rope if (rope.apply(key, position) - turned).abs().max() <= near else None


def _sentence(name: str, reason: str) -> str:
    return f"{name} takes RoPE off keys before it stores them, and {reason}; {INSTEAD}"

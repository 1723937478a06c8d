"""The format of one attention layer, once the model exists: its rotary embeddings say which channels they pair, and how
they turn keys.

An attention layer is given keys that RoPE has turned already. For means of keys that turn with their positions, vLLM's
tables of cosines and sines are taken from the rotary embeddings that the model has made; each is compared with what its
embedding does to a key, and one that does something else counts as none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvq.formats import Geometry, PageFormat
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.integration import compat
from vllm_kvq.integration.plan.model.rope import no_rope, unknown_pairs
from vllm_kvq.integration.plan.options import Options

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionImpl


def bind_layer(options: Options, model: ModelConfig, geometry: Geometry) -> PageFormat:
    """`geometry`: the layer's, except for RoPE. ValueError where the model's RoPE is not what the format needs."""
    settings = options.at(geometry.layer)
    if settings.keys.pairs_channels:
        pairing, rotary = _pairing(options.name, settings.get("pairing"), model, geometry.head_size)
        geometry = replace(geometry, pairing=pairing, rotary_dim=rotary)
    return options.bind(geometry)


def layer_of(vllm_config: VllmConfig, impl: AttentionImpl) -> tuple[str, Any]:
    """The layer that this attention implementation works for, and its name; vLLM hands it neither."""
    layers = vllm_config.compilation_config.static_forward_context
    return next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is impl)


def _pairing(name: str, wanted: str | None, model: ModelConfig, head_size: int) -> tuple[str, int | None]:
    styles = compat.rope_styles(head_size)
    if wanted is not None:
        dims = {dim for style, dim in styles if style == wanted}
        return wanted, dims.pop() if len(dims) == 1 else _rotary_dim(model.hf_text_config, head_size)
    reason = no_rope(model)
    if reason is None and len(styles) != 1:
        reason = f"the model has {len(styles) or 'no'} kinds of RoPE for head size {head_size}"
    if reason is not None:
        raise ValueError(str(unknown_pairs(name, reason)))
    return styles.pop()


def _rotary_dim(config: Any, head_size: int) -> int | None:
    """How many channels the configuration says that RoPE rotates."""
    rope = getattr(config, "rope_parameters", None)
    share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return None if share is None else int(head_size * share)


def rope_of_layer(model: Any, name: str) -> Rope | None:
    """The RoPE of this attention layer of vLLM's, found in the module that it is a part of; None where there is none,
    or one that does more than a table says."""
    owner = model
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part, None)
    embedding = getattr(owner, "rotary_emb", None)
    return None if embedding is None else table_of(embedding)


@functools.cache
def table_of(embedding: Any) -> Rope | None:
    """What a rotary embedding of vLLM's does to keys; None where it does something other than its table says."""
    table = getattr(embedding, "cos_sin_cache", None)
    if table is None:
        return None
    rope = Rope(table, compat.rope_style(embedding)[0])
    position = torch.tensor([0, 1, len(table) // 2, len(table) - 1], device=table.device)
    rng = torch.Generator().manual_seed(0)
    key = torch.randn(len(position), embedding.head_size, generator=rng, device="cpu").to(table)
    turned = embedding.forward_native(position, key.clone(), key.clone())[1].float()
    # vLLM's are rounded once, to the model's dtype
    near = 4 * torch.finfo(table.dtype).eps * turned.abs().max()
    return rope if (rope.apply(key, position) - turned).abs().max() <= near else None

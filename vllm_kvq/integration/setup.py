"""From a vLLM configuration to a bound format: one place that reads `--kv-cache-dtype` and `--additional-config`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.integration import compat


def kvq_options(vllm_config: Any) -> dict[str, Any]:
    """The user's `{"kvq": {...}}`, checked to be an object."""
    extra = vllm_config.additional_config
    options = extra.get("kvq", {}) if isinstance(extra, Mapping) else {}
    if not isinstance(options, Mapping):
        raise ValueError(f"additional config 'kvq' is {options!r}; it must be an object of options")
    return dict(options)


def bind_layer(vllm_config: Any, head_size: int, layer: int, dtype: torch.dtype) -> PageFormat:
    """The format of one attention layer, once the model exists (its rotary embeddings tell the pairing)."""
    cache = vllm_config.cache_config
    options = kvq_options(vllm_config)
    settings = get_format(cache.cache_dtype).settings(options)
    pairing, rotary = "half", None
    if settings.keys.pairs_channels:
        pairing, rotary = _pairing(vllm_config.model_config, head_size, settings.get("pairing"))
    return _bind(
        cache.cache_dtype,
        json.dumps(options, sort_keys=True),
        Geometry(head_size, cache.block_size, dtype, layer, pairing, rotary),
    )


@functools.cache
def _bind(name: str, options: str, geometry: Geometry) -> PageFormat:
    return get_format(name).bind(geometry, json.loads(options))


def _pairing(model: Any, head_size: int, wanted: str | None) -> tuple[str, int | None]:
    styles = compat.rope_styles(head_size)
    if wanted is not None:
        dims = {dim for style, dim in styles if style == wanted}
        return wanted, dims.pop() if len(dims) == 1 else _rotary_dim(model.hf_text_config, head_size)
    if problem := pairing_problem(model):
        raise ValueError(problem)
    if len(styles) != 1:
        raise ValueError(
            _pairing_sentence(f"the model has {len(styles) or 'no'} kinds of RoPE for head size {head_size}")
        )
    return styles.pop()


def pairing_problem(model: Any) -> str | None:
    """Why PolarQuant can't know which channels belong together, as far as the configuration tells."""
    config = model.hf_text_config.to_dict()
    if not any(value for key, value in config.items() if "rope" in key or "rotary" in key):
        return _pairing_sentence("the model has no RoPE")
    if model.using_transformers_backend():
        return _pairing_sentence("vLLM runs this model through Transformers, which does not tell")
    return None


def _pairing_sentence(reason: str) -> str:
    return (
        f"PolarQuant needs to know which channels RoPE rotates together and {reason}; "
        "set the kvq option 'pairing' to 'half' or 'interleaved', or use squat2 or innerq2"
    )


def _rotary_dim(config: Any, head_size: int) -> int | None:
    """How many channels the configuration says that RoPE rotates."""
    rope = getattr(config, "rope_parameters", None)
    share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return None if share is None else int(head_size * share)

"""From a vLLM configuration to a bound format: one place that reads `--kv-cache-dtype` and `--additional-config`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvq.formats import FORMATS, Geometry, PageFormat, get_format
from vllm_kvq.formats.by_layer import all_options, options_at
from vllm_kvq.formats.settings import Settings
from vllm_kvq.formats.table import readers
from vllm_kvq.integration import compat
from vllm_kvq.integration.plan.rope import no_rope, rope_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def kvq_options(vllm_config: VllmConfig) -> dict[str, Any]:
    """The user's `{"kvq": {...}}`, checked to be an object."""
    extra = vllm_config.additional_config
    options = extra.get("kvq", {}) if isinstance(extra, Mapping) else {}
    if not isinstance(options, Mapping):
        raise ValueError(f"additional config 'kvq' is {options!r}; it must be an object of options")
    return dict(options)


def options_problem(vllm_config: VllmConfig) -> str | None:
    """Why an option would not be read: it stands outside of "kvq", or no format of ours is chosen.

    What is no option of ours may belong to another plugin.
    """
    extra, dtype = vllm_config.additional_config, vllm_config.cache_config.cache_dtype
    if not isinstance(extra, Mapping):
        return None
    for key in extra:
        if key != "kvq" and _letters(key) in ("kvq", "vllmkvq"):
            return f"additional config {key!r} is not read; the options stand in 'kvq', in small letters"
    if dtype not in FORMATS:
        return _without_format(dtype) if "kvq" in extra else None
    for key, value in extra.items():
        if key in readers():
            right = json.dumps({"kvq": {key: value}})
            return f"kvq option {key!r} stands outside of 'kvq'; write --additional-config '{right}'"
    return None


def _letters(key: object) -> str:
    return "".join(c for c in str(key).casefold() if c.isalnum())


def _without_format(dtype: str) -> str:
    return (
        f"kvq options are given, and --kv-cache-dtype {dtype} reads none of them; choose one of our formats "
        "(vllm-kvq formats lists them), or leave the options out"
    )


def settings_of(vllm_config: VllmConfig, layer: int | None = None) -> Settings:
    """The configured format's settings in one layer: its defaults, and the user's options.

    What is the same in all layers (`by_layer.SHARED`) needs none; ValueError for options that no layer could have.
    """
    options, fmt = kvq_options(vllm_config), get_format(vllm_config.cache_config.cache_dtype)
    for other in all_options(options):
        fmt.settings(other)
    return fmt.settings(options_at(options, layer))


def bind(vllm_config: VllmConfig, geometry: Geometry) -> PageFormat:
    """The configured format for such heads. The same object for the same answer, so that layers can share work."""
    options = json.dumps(options_at(kvq_options(vllm_config), geometry.layer), sort_keys=True)
    return _bind(vllm_config.cache_config.cache_dtype, options, geometry)


@functools.cache
def _bind(name: str, options: str, geometry: Geometry) -> PageFormat:
    return get_format(name).bind(geometry, json.loads(options))


def bind_layer(vllm_config: VllmConfig, head_size: int, layer: int, dtype: torch.dtype) -> PageFormat:
    """The format of one attention layer, once the model exists: its rotary embeddings say which channels they pair."""
    pairing, rotary, settings = "half", None, settings_of(vllm_config, layer)
    if settings.keys.pairs_channels:
        pairing, rotary = _pairing(vllm_config, head_size, settings.get("pairing"))
    geometry = Geometry(head_size, vllm_config.cache_config.block_size, dtype, layer, pairing, rotary)
    fmt = bind(vllm_config, geometry)
    if fmt.keys.before_rope:
        return bind(vllm_config, replace(geometry, rope=rope_of(fmt.name, head_size)))
    return fmt


def layer_of(vllm_config: VllmConfig, impl: Any) -> tuple[str, Any]:
    """The layer that this attention implementation works for, and its name; vLLM hands it neither."""
    layers = vllm_config.compilation_config.static_forward_context
    return next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is impl)


def _pairing(vllm_config: VllmConfig, head_size: int, wanted: str | None) -> tuple[str, int | None]:
    styles, model = compat.rope_styles(head_size), vllm_config.model_config
    if wanted is not None:
        dims = {dim for style, dim in styles if style == wanted}
        return wanted, dims.pop() if len(dims) == 1 else _rotary_dim(model.hf_text_config, head_size)
    reason = no_rope(model)
    if reason is None and len(styles) != 1:
        reason = f"the model has {len(styles) or 'no'} kinds of RoPE for head size {head_size}"
    if reason is not None:
        raise ValueError(_pairing_sentence(vllm_config, reason))
    return styles.pop()


def pairing_problem(vllm_config: VllmConfig) -> str | None:
    """Why the format can't know which channels RoPE pairs, as far as the configuration says."""
    settings = settings_of(vllm_config)
    if not settings.keys.pairs_channels or settings.get("pairing") is not None:
        return None
    reason = no_rope(vllm_config.model_config)
    return None if reason is None else _pairing_sentence(vllm_config, reason)


def _pairing_sentence(vllm_config: VllmConfig, reason: str) -> str:
    return (
        f"{vllm_config.cache_config.cache_dtype} needs to know which channels RoPE rotates together and {reason}; "
        "set the kvq option 'pairing' to 'half' or 'interleaved', or use squat2 or innerq2"
    )


def _rotary_dim(config: Any, head_size: int) -> int | None:
    """How many channels the configuration says that RoPE rotates."""
    rope = getattr(config, "rope_parameters", None)
    share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return None if share is None else int(head_size * share)

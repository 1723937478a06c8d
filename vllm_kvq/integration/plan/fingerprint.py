"""What pages mean, as one short word: caches may exchange pages only if theirs is the same.

It covers the bytes of a page and whatever decides how they are chosen and read: the layout, every option that is in
effect in each layer, constants, the heads of the whole model and the model itself, as far as its name and configuration
say. It does not cover what changes no page: kernels, memory, the length of requests, how many ranks share the heads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.constants import Constants
from vllm_kvq.formats.page import MAGIC
from vllm_kvq.formats.parts.fields import Region
from vllm_kvq.integration.plan.drafts import WITH_CACHE
from vllm_kvq.integration.plan.model.layers import Layers

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

DIGITS = 12
ABOUT_THE_FILE = ("_name_or_path", "transformers_version")
"""What a model's configuration says of its own file."""


def fingerprint(
    vllm_config: VllmConfig,
    parts: Sequence[tuple[Sequence[int], PageFormat]],
    layers: Layers,
    recomputed: int,
    constants: str | None = None,
) -> str:
    """`parts`: the packed layers that are alike, and their format. `constants`: what a calibrated format's mean."""
    model, spec = vllm_config.model_config, vllm_config.speculative_config
    cached_draft = spec is not None and spec.method in WITH_CACHE
    return digest(
        {
            "parts": [[list(members), format_meaning(fmt)] for members, fmt in parts],
            "in 16 bits": [sorted(layers.skipped), sorted(layers.windows)],
            "recompute": recomputed,
            "constants": constants,
            "heads": model.get_total_num_kv_heads(),
            "model": model_meaning(model),
            "draft": model_meaning(spec.draft_model_config) if cached_draft else None,
        }
    )


def format_meaning(fmt: PageFormat) -> dict[str, Any]:
    """All that one layer's pages depend on, but for the model."""
    settings, geometry = fmt.settings, fmt.geometry
    return {
        "layout": MAGIC,
        "format": fmt.name,
        "codecs": [settings.keys.name, settings.values.name],
        "options": dict(settings.own),
        "tokens": [fmt.N, fmt.W, fmt.S],
        "head": [geometry.head_size, geometry.dtype],
        "fields": [_fields(fmt.page_region), _fields(fmt.slab_region)],
        "constants": None if geometry.constants is None else _constants(geometry.constants),
    }


def _fields(region: Region) -> list[Any]:
    return [[field.name, field.dtype, field.shape, at] for field, at in zip(region.fields, region.offsets, strict=True)]


def _constants(constants: Constants) -> list[str | None]:
    halves = (constants.keys, constants.values)
    return [None if x is None else hashlib.sha256(x.contiguous().cpu().numpy().tobytes()).hexdigest() for x in halves]


def model_meaning(model: ModelConfig) -> list[Any]:
    """Its name as the user wrote it, and its configuration; nobody reads the weights for this."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in ABOUT_THE_FILE}
    return [model.model, model.revision, model.dtype, model.quantization, config]


def digest(meaning: Any) -> str:
    text = json.dumps(meaning, sort_keys=True, default=_written)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _written(value: Any) -> str:
    """What JSON can't write, the same in every process."""
    return str(value) if isinstance(value, torch.dtype) else type(value).__qualname__

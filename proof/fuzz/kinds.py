"""The kinds of models that the fuzzer's engines have, and which of them can be judged under a format."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from proof.models import SERVED, named
from proof.models.architecture import Architecture
from proof.models.copies import COPIES, copy
from proof.models.seeing import SEEING
from vllm_kvq.formats import get_format

LLAMA = "Llama"
MODELS = (*(a.name for a in SERVED if a.dtype == "float32" and not a.vision), *SEEING)
"""Kinds of models, by their names in docs/models.md, whose tokens must equal plain vLLM's in float32."""


def kind(name: str) -> Architecture:
    """One of MODELS or COPIES; ValueError if a copy's real model is not there."""
    return copy(name) if name in COPIES else SEEING[name].arch if name in SEEING else named(name)


def judged(models: Sequence[str], format_name: str) -> list[str]:
    """The models whose tokens can be judged under this format: `lossless` must equal plain vLLM. Constants are not
    fitted to hybrids."""
    lossless, polar = format_name == "lossless", format_name.startswith("polar")
    fitted = get_format(format_name).settings().calibrated
    known = {name for name in models if kind(name).replay and not (polar and kind(name).rope == "partial")}
    return [name for name in models if lossless or (name in known and not (fitted and kind(name).hybrid))]


def draw_model(rng: Random, models: Sequence[str]) -> str:
    """Models with windows, hybrids, models with adapters or images, and copies are each as frequent as all the rest."""
    groups: dict[str, list[str]] = {}
    for name in models:
        groups.setdefault(_group(name), []).append(name)
    return rng.choice(rng.choice(list(groups.values())))


def _group(name: str) -> str:
    if name in COPIES:
        return "copies"
    arch = kind(name)
    if arch.adapter or arch.vision:
        return "adapters and images"
    return "hybrids" if arch.hybrid else "windows" if arch.windows else "others"

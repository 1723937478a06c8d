"""Faults in how a running engine handles images, planted for the oracle to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _runner(engine: Any) -> Any:
    return engine.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _change(engine: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each picture's features go through `change`."""
    model = _runner(engine).model
    embed = model.embed_multimodal
    model.embed_multimodal = lambda **pixels: [change(features) for features in embed(**pixels)]


def shifted(engine: Any) -> None:
    """Every feature is one token too late."""
    _change(engine, lambda features: features.roll(1, 0))


def another(engine: Any) -> None:
    """All pictures look like the first one."""
    first: list[torch.Tensor] = []

    def kept(features: torch.Tensor) -> torch.Tensor:
        first.append(features)
        return first[0]

    _change(engine, kept)


class _FromItsStart:
    def __init__(self, features: torch.Tensor) -> None:
        self.features = features

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self.features[: part.stop - part.start]


def begun_again(engine: Any) -> None:
    """A chunk that begins within a picture takes its features from the first on."""
    runner = _runner(engine)
    cached = runner._get_encoder_output_from_cache
    runner._get_encoder_output_from_cache = lambda name: _FromItsStart(cached(name))


def not_in_keys(engine: Any) -> None:
    """vLLM's prefix cache ignores which picture the tokens stand for."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_mm_extra_hash_keys = lambda request, start, end, first: ([], first)


def all_in_a_row(engine: Any) -> None:
    """M-RoPE rotates a picture's tokens as it does words."""
    _place(engine, lambda tokens, found, behind: (torch.arange(tokens).expand(3, -1), 0))


def counted_by_tokens(engine: Any) -> None:
    """What follows the prompt is rotated by its index, though a picture's tokens took fewer positions."""
    _place(engine, lambda tokens, found, behind: (found, 0))


def _place(engine: Any, place: Callable[[int, torch.Tensor, int], tuple[torch.Tensor, int]]) -> None:
    model = _runner(engine).model
    known = model.get_mrope_input_positions
    model.get_mrope_input_positions = lambda tokens, features: place(len(tokens), *known(tokens, features))

"""What formats store of a text, as read by `Reader.logits`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvq.eval.choice import FP8, Choice
from vllm_kvq.eval.heads.capture import Layer
from vllm_kvq.eval.heads.heads import bound, packed_layers
from vllm_kvq.eval.reading.attention import Packed, boundary
from vllm_kvq.eval.reading.reader import Cache, Past, Reads
from vllm_kvq.formats.roundtrip import fitted, through_pages
from vllm_kvq.formats.table import PLAIN

BLOCK = 128
"""Tokens per page unless the format's options say otherwise: a server's default."""


def cache_of(choice: Choice, past: Past) -> Cache | None:
    """None: the exact cache. ValueError if the format does not support this model."""
    if choice.format == PLAIN:
        return None
    if choice.format == FP8:
        return fp8
    return Pages(choice, past, frozenset(packed_layers(past.captured, choice.format, choice.options)))


def fp8(layer: Layer, key: torch.Tensor, value: torch.Tensor) -> Reads:
    """The arithmetic of vLLM's `fp8` with scale 1, on every cached token of every layer."""
    top = torch.finfo(torch.float8_e4m3fn).max
    return Reads(*(x.clamp(-top, top).to(torch.float8_e4m3fn).float() for x in (key, value)))


@dataclass(frozen=True)
class Pages:
    """The caches of one of our formats, in the layers that a server would pack."""

    choice: Choice
    past: Past
    packed: frozenset[int]

    def __call__(self, layer: Layer, key: torch.Tensor, value: torch.Tensor) -> Reads:
        exact = Reads(key, value)
        if layer.index not in self.packed:
            return exact
        page = bound(self.past.captured, layer, self.choice.format, self.choice.options, BLOCK)
        last = len(key) - 1
        end = max(boundary(page.unit, window, last) for window in (page.W_keys, page.W))
        if end <= page.S:
            return exact
        state = fitted(page, layer.key, layer.query)
        read = through_pages(page, key[:end], value[:end], state, prompt=self.past.tokens)
        return Reads(key, value, Packed.of(page, *read))

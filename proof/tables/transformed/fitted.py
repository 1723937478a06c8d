"""Constants of transformed keys (formats/methods/klt.py), fitted to texts that all begin at position 0."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.formats.constants import Constants, Moments, known
from vllm_kvq.formats.methods.klt import TransformedKeys
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.turning import Turning

SINKS = 4
"""They are never packed."""


def fitted(texts: Sequence[Captured]) -> Mapping[int, torch.Tensor]:
    """By layer. The mean of keys turns as the longest text's RoPE does."""
    longest = max(texts, key=lambda text: len(text.layers[0].key))
    turning = Turning.of(longest.rope, longest.layers[0].head_size)
    layers = zip(*(text.layers for text in texts), strict=True)
    return {same[0].index: TransformedKeys.fit_moments(_moments(same, turning), turning) for same in layers}


def _moments(same: Sequence[Layer], turning: Turning) -> Moments:
    of_texts = (Moments.of(x.query, x.key, turning.phases(torch.arange(len(x.key)) // SLAB)) for x in same)
    return functools.reduce(operator.add, of_texts)


def own_means(constants: Mapping[int, Constants], text: Captured) -> Mapping[int, Constants]:
    """The same with the means of this text's keys, which turn where theirs do."""
    found = {}
    for layer in text.layers:
        keys = known(constants[layer.index].keys, TransformedKeys.name).clone()
        turning = Turning.of_rows(*keys[0, 2:4])
        slab = torch.arange(SINKS, len(layer.key)) // SLAB
        mean = Moments.of(layer.query[SINKS:], layer.key[SINKS:], turning.phases(slab)).turned_mean(turning)
        keys[:, 0, : mean.shape[-1]] = mean
        found[layer.index] = replace(constants[layer.index], keys=keys)
    return found

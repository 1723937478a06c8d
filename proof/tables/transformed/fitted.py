"""Constants of transformed keys (formats/methods/klt.py), fitted to texts that all begin at position 0."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import torch

from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.formats.constants import Moments
from vllm_kvq.formats.methods.klt import TransformedKeys
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.turning import Turning


def fitted(texts: Sequence[Captured]) -> Mapping[int, torch.Tensor]:
    """By layer. The mean of keys turns as the longest text's RoPE does."""
    longest = max(texts, key=lambda text: len(text.layers[0].key))
    turning = Turning.of(longest.rope, longest.layers[0].head_size)
    layers = zip(*(text.layers for text in texts), strict=True)
    return {same[0].index: TransformedKeys.fit_moments(_moments(same, turning), turning) for same in layers}


def _moments(same: Sequence[Layer], turning: Turning) -> Moments:
    of_texts = (Moments.of(x.query, x.key, turning.phases(torch.arange(len(x.key)) // SLAB)) for x in same)
    return functools.reduce(operator.add, of_texts)

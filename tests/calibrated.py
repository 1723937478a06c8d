"""Constants of calibrated formats for tests of kernels: fitted to random tokens, for any number of KV heads."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_kvq.eval.heads.synthetic import attention_data
from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.codec import Codec
from vllm_kvq.formats.constants import Calibration, Constants

GROUP, TOKENS = 2, 256


@functools.cache
def _fitted(codec: type[Codec], options: tuple[tuple[str, Any], ...], head_size: int, heads: int) -> torch.Tensor:
    text = Calibration(*attention_data(head_size, TOKENS, heads, GROUP, rope=True, seed=1))
    return codec.fit_constants(text, dict(options))


def calibrated(fmt: PageFormat, heads: int) -> PageFormat:
    """The same format with constants of `heads` KV heads, no two of them alike; itself if it needs none."""
    if not fmt.calibrated:
        return fmt
    s, d = fmt.settings, fmt.geometry.head_size
    keys, values = (
        _fitted(codec, tuple(s.of_codec(codec).items()), d, heads) if codec.calibrated else None
        for codec in (s.keys, s.values)
    )
    return fmt.with_constants(Constants(keys, values))

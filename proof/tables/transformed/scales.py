"""Scales of two bytes, which `python -m proof transforms` compares with those of formats/parts/scales.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvq.formats.parts import search
from vllm_kvq.formats.parts.fields import Field
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.quant import positive_half


def searched(
    y: torch.Tensor, step: torch.Tensor, most: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = positive_half(search.fitted(y, step, most, weight))
    return search.rounded(y, scale, step, most), scale


FLOAT16: Mapping[str, Any] = {
    "searched": searched,
    "scale_field": lambda name: Field(name, torch.float16, (SLAB,)),
    "scale_of": torch.Tensor.float,
}
"""Names of formats/methods/klt.py."""

"""Scales of tokens that `python -m proof transforms` compares with those of formats/parts/search.py."""

from __future__ import annotations

import torch

from vllm_kvq.formats.parts import search
from vllm_kvq.formats.parts.quant import positive_half

DROPPED = 7
"""Last bits of a float16 that a scale of 8 bits lacks, like the sign: 5 bits of exponent and 3 of mantissa are left."""
NORMAL = 2.0**-14
Quantized = tuple[torch.Tensor, torch.Tensor]


def not_fitted(y: torch.Tensor, step: torch.Tensor, most: torch.Tensor, weight: torch.Tensor) -> Quantized:
    """The best of f rms(y) as they are."""
    stored = (most > 0).float()
    rms = ((y.square() * stored).sum(-1, keepdim=True) / stored.sum(-1, keepdim=True)).sqrt()
    tried = torch.stack([positive_half(rms * factor) for factor in search.FACTORS])
    off = search.levels(search.rounded(y, tried, step, most), step, most) * tried - y
    scale = tried.gather(0, (off.square() * weight).sum(-1, keepdim=True).argmin(0, keepdim=True))[0]
    return search.rounded(y, scale, step, most), scale


def in_eight_bits(y: torch.Tensor, step: torch.Tensor, most: torch.Tensor, weight: torch.Tensor) -> Quantized:
    """The upper bits of the scale that is found; a kernel would shift them to where a float16 has them."""
    _, scale = search.searched(y, step, most, weight)
    bits = scale.half().view(torch.int16).int() + (1 << DROPPED - 1)
    shorter = (bits >> DROPPED << DROPPED).to(torch.int16).view(torch.float16).float().clamp_min(NORMAL)
    return search.rounded(y, shorter, step, most), shorter

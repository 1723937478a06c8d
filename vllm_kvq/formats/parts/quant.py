"""Quantizer primitives that all methods share. All arithmetic is float32; parameters are stored as float16.

Codes are always chosen against the value that will be *read back*: the stored parameter is rounded first, and the
code is the best one for the rounded parameter.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Quantized: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Codes as float32; scale and zero, with size 1 along the dimension of a group."""

LIMIT = 32768.0
"""Inputs are clamped to +-LIMIT, so a range (2 * LIMIT) / 3 and a radius sqrt(2) * LIMIT stay finite in float16."""

TINY = 2.0**-24
"""The smallest positive float16: the scale of a group whose values are all equal, which avoids division by zero."""


def sanitize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(finite float32 copy of x, number of replaced elements as a 0-d int64 tensor): nan -> 0, |x| -> at most LIMIT."""
    f = x.float()
    clean = torch.nan_to_num(f, nan=0.0, posinf=LIMIT, neginf=-LIMIT).clamp(-LIMIT, LIMIT)
    return clean, (clean != f).sum()


def half(x: torch.Tensor) -> torch.Tensor:
    """x rounded to what float16 stores, kept as float32."""
    return x.clamp(-65504.0, 65504.0).half().float()


def positive_half(x: torch.Tensor) -> torch.Tensor:
    """A scale or norm as float16 stores it, never zero."""
    return half(x).clamp_min(TINY)


def affine_parameters(x: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) over `dim`, kept with size 1: zero = min, scale = (max - min) / (2^b - 1)."""
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    return positive_half((hi - lo) / (2**bits - 1)), half(lo)


FIT_ROUNDS = 3
FIT_FROM = {2: 0.8, 4: 1.0}
"""Bits -> fraction of the range from which the fit starts: with only four levels it pays to cut off the extremes."""


def fitted_parameters(x: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) over `dim`, kept with size 1, with less squared error than those of the range, or else the latter.

    Two steps alternate: codes for scale and zero, and least-squares scale and zero for these codes:

        scale = sum c (x - mean x) / sum (c - mean c)^2,   zero = mean x - scale mean c
    """
    n, whole = x.shape[dim], affine_parameters(x, dim, bits)
    lo, hi, mean = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True), x.mean(dim, keepdim=True)
    part = FIT_FROM[bits]
    scale, zero = positive_half((hi - lo) * part / (2**bits - 1)), half(lo + (hi - lo) * ((1 - part) / 2))
    for _ in range(FIT_ROUNDS):
        codes = affine_codes(x, scale, zero, bits)
        total = codes.sum(dim, keepdim=True)
        spread = codes.square().sum(dim, keepdim=True) - total * total / n
        slope = positive_half((codes * (x - mean)).sum(dim, keepdim=True) / spread.clamp_min(TINY))
        # equal codes have no slope
        scale, zero = (
            torch.where(spread > 0, new, old) for new, old in ((slope, scale), (half(mean - slope * total / n), zero))
        )
    better = _squared_error(x, dim, scale, zero, bits) < _squared_error(x, dim, *whole, bits)
    return torch.where(better, scale, whole[0]), torch.where(better, zero, whole[1])


def _squared_error(x: torch.Tensor, dim: int, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (torch.addcmul(zero, affine_codes(x, scale, zero, bits), scale) - x).square().sum(dim, keepdim=True)


def affine_codes(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1)

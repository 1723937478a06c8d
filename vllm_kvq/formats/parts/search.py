"""One scale per token, the best of some: the quantizer of coordinates that are alike.

    levels    l(code) = (code - (2^b - 1) / 2) step,  step = 2 h_b / (2^b - 1); no zero, h_b from HALF_WIDTH
    tried     a = f rms(y) for f of FACTORS, and codes nearest to y / a
    best      of these, where  sum_c w_c (y_c - a l(code_c))^2  is least
    fitted    the a that fits its codes best,  sum_c w_c y_c l(code_c) / sum_c w_c l(code_c)^2
    stored    the best of the four scales around it that one byte can store (scales.py); codes nearest to y / a

The root mean square by itself would clip the tokens with outliers, the maximum would waste levels on all others.
HALF_WIDTH is where the uniform levels of b bits have the least squared error on normal numbers.
"""

from __future__ import annotations

import torch

from vllm_kvq.formats.parts.quant import TINY
from vllm_kvq.formats.parts.scales import around, scale_of

HALF_WIDTH = (0.0, 0.798, 1.494, 2.05, 2.52, 3.0, 3.4)
"""By bits."""
FACTORS = (0.8, 1.0, 1.25, 1.6, 2.2, 3.5)
LEAST = 1e-30
"""What a fit divides by at least."""


def widths(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and largest code by the channel's bits, float32; a channel without bits has the code 0 only."""
    most = (2.0 ** bits.double() - 1).float()
    # vLLM sets PyTorch's default type to the model's while it loads
    half = torch.tensor(HALF_WIDTH, dtype=torch.float32, device=bits.device)
    return 2 * half[bits] / most.clamp_min(1), most


def levels(codes: torch.Tensor, step: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    return (codes - most / 2) * step


def rounded(y: torch.Tensor, scale: torch.Tensor, step: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """The codes nearest to y for tokens of this scale."""
    return (y / (scale * step.clamp_min(1e-9)) + most / 2).round().clamp_min(0).minimum(most)


def _error(
    y: torch.Tensor, scale: torch.Tensor, step: torch.Tensor, most: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    off = levels(rounded(y, scale, step, most), step, most) * scale - y
    return (off.square() * weight).sum(-1, keepdim=True)


def fitted(y: torch.Tensor, step: torch.Tensor, most: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(..., tokens, d) -> the scales (..., tokens, 1) that fit the best codes found."""
    stored = (most > 0).float()
    rms = ((y.square() * stored).sum(-1, keepdim=True) / stored.sum(-1, keepdim=True)).sqrt()
    least, best = torch.full_like(rms, torch.inf), torch.zeros_like(rms)
    for factor in FACTORS:
        scale = (rms * factor).clamp_min(TINY)
        error = _error(y, scale, step, most, weight)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, scale, best)
    level = levels(rounded(y, best, step, most), step, most)
    seen, size = ((x * level * weight).sum(-1, keepdim=True) for x in (y, level))
    return seen / size.clamp_min(LEAST)


def searched(
    y: torch.Tensor, step: torch.Tensor, most: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., tokens, d) -> codes as float32, and the bytes (..., tokens, 1) of the scales.

    step, most and weight are those of the d channels, and broadcast; channels whose most is 0 are not stored.
    """
    bytes = torch.stack(around(fitted(y, step, most, weight)))
    errors = torch.stack([_error(y, scale_of(byte), step, most, weight) for byte in bytes])
    byte = bytes.gather(0, errors.argmin(0, keepdim=True))[0]
    return rounded(y, scale_of(byte), step, most), byte

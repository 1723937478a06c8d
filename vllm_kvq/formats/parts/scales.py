"""Scales of tokens in one byte: the upper part of a positive float16.

    float16   seeeeemm mmmmmmmm
    byte       eeeeemm m          shifted by 7 bits, it is a float16 again: no sign, 5 bits of exponent, 3 of mantissa

Neighbours are up to an eighth apart. That costs little, because a token's codes are chosen for the scale that is
stored, and because the best of the four around a number is taken (search.py).
"""

from __future__ import annotations

import torch

from vllm_kvq.formats.parts.fields import Field
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.quant import half

SHIFT = 7
"""Lower bits of a float16 that the byte lacks."""
LARGEST = 0xF7
"""The byte of the largest finite number; the least is 1, because no scale is zero."""
AROUND = 4


def scale_field(name: str) -> Field:
    """The scales of a slab's tokens."""
    return Field(name, torch.uint8, (SLAB,))


def around(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The bytes of four neighbouring scales, in their order; in the middle, between two of them, lies x."""
    below = half(x.clamp_min(0)).half().view(torch.int16) >> SHIFT
    first = (below - 1).clamp(1, LARGEST - AROUND + 1).to(torch.uint8)
    return tuple(first + i for i in range(AROUND))


def scale_of(byte: torch.Tensor) -> torch.Tensor:
    """In float32."""
    return (byte.short() << SHIFT).view(torch.float16).float()

"""The mean of a slab's keys, which RoPE turns (formats/parts/turning.py): a product with its cosines and sines.

`turn_ptr`: the tables one after the other, (FINE + COARSE, d) float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.formats.parts import turning
from vllm_kvq.triton_kernels.lang import column_sum

FINE: tl.constexpr = tl.constexpr(turning.FINE)
COARSE: tl.constexpr = tl.constexpr(turning.COARSE)


@triton.jit
def page_slab(base):
    """The number of a page's first slab, as its header tells: any number, if the page is damaged."""
    return (tl.load(base + 1).to(tl.uint32, bitcast=True) // 32).to(tl.int32)


@triton.jit
def turned(turn_ptr, n, pair, D: tl.constexpr):
    """Cosines and sines of these pairs of channels in slab n; of pairs that there are not, 0."""
    half: tl.constexpr = D // 2
    there = pair < half
    fine, coarse = turn_ptr + n % FINE * D, turn_ptr + (FINE + n // FINE % COARSE) * D
    c = tl.load(fine + pair, mask=there, other=0.0)
    s = tl.load(fine + half + pair, mask=there, other=0.0)
    x = tl.load(coarse + pair, mask=there, other=0.0)
    y = tl.load(coarse + half + pair, mask=there, other=0.0)
    return c * x - s * y, s * x + c * y


@triton.jit
def mean_of(mean_ptr, turn_ptr, n, channel, there, D: tl.constexpr, SOME: tl.constexpr):
    """The mean of these channels in slab n; mean_ptr: (d, d), a row for each number of e. SOME pairs at a time."""
    half: tl.constexpr = D // 2
    total = channel * 0.0
    for first in tl.static_range(0, half, SOME):
        pair = first + tl.arange(0, SOME)
        cos, sin = turned(turn_ptr, n, pair, D)
        place = mean_ptr + pair[:, None] * D + channel[None, :]
        inside = (pair < half)[:, None] & there[None, :]
        x = tl.load(place, mask=inside, other=0.0)
        y = tl.load(place + half * D, mask=inside, other=0.0)
        total += column_sum(cos[:, None] * x + sin[:, None] * y)
    return total

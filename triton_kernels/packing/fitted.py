"""Scales and zeros with less squared error than those of the range: `fitted_parameters` of formats/parts/quant.py."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import TINY
from vllm_kvq.triton_kernels.packing.values import affine_to, positive_half, range_parameters


@triton.jit
def _half(x):
    return tl.maximum(tl.minimum(x, 65504.0), -65504.0).to(tl.float16).to(tl.float32)


@triton.jit
def _sum(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, tl.standard._sum_combine)


@triton.jit
def _part(x, COUNT: tl.constexpr):
    return tl.div_rn(x, tl.full(x.shape, COUNT, tl.float32))


@triton.jit
def _codes(x, scale, zero, top, AXIS: tl.constexpr):
    return affine_to(x, tl.expand_dims(scale, AXIS), tl.expand_dims(zero, AXIS), tl.expand_dims(top, AXIS))


@triton.jit
def _squared_error(x, inside, scale, zero, top, AXIS: tl.constexpr):
    code = _codes(x, scale, zero, top, AXIS)
    error = tl.expand_dims(zero, AXIS) + code * tl.expand_dims(scale, AXIS) - x
    return _sum(tl.where(inside, error * error, 0.0), AXIS)


@triton.jit
def fitted_parameters(x, inside, low, high, top, COUNT: tl.constexpr, AXIS: tl.constexpr):
    """(scale, zero) as float16 stores them, for codes up to `top`, of the COUNT numbers along AXIS that are `inside`,
    from `low` to `high`."""
    part = tl.where(top > 3, 1.0, 0.8)
    mean = _part(_sum(tl.where(inside, x, 0.0), AXIS), COUNT)
    away = x - tl.expand_dims(mean, AXIS)
    scale = positive_half(tl.div_rn((high - low) * part, top))
    zero = _half(low + (high - low) * tl.where(top > 3, 0.0, 0.1))
    for _ in range(3):
        code = tl.where(inside, _codes(x, scale, zero, top, AXIS), 0.0)
        total = _sum(code, AXIS)
        spread = _sum(code * code, AXIS) - _part(total * total, COUNT)
        slope = positive_half(tl.div_rn(_sum(code * away, AXIS), tl.maximum(spread, TINY)))
        # equal codes have no slope
        zero = tl.where(spread > 0, _half(mean - _part(slope * total, COUNT)), zero)
        scale = tl.where(spread > 0, slope, scale)
    whole, least = range_parameters(low, high, top)
    error = _squared_error(x, inside, scale, zero, top, AXIS)
    better = error < _squared_error(x, inside, whole, least, top, AXIS)
    return tl.where(better, scale, whole), tl.where(better, zero, least)

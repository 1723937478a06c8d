"""Packs what needs all channels of a slab at once: boosted keys (Kitty's and SQuat's), and values per token that are
rotated or fitted.

A slab is one tile of 32 tokens and R.columns channels, a power of two, of which R.d are real. Which codes share a
byte depends on the data, or on a D that is not a power of two, so bytes are a matrix product: codes times the power of
two of their place in the byte. All of it is exact in float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import clean, lost
from vllm_kvq.triton_kernels.packing.fitted import fitted_parameters
from vllm_kvq.triton_kernels.packing.keys import RANKS, pull, store_keys, subspace
from vllm_kvq.triton_kernels.packing.values import (
    affine,
    affine_to,
    load_channels,
    parameters,
    range_parameters,
    store_values,
    top_of,
)
from vllm_kvq.triton_kernels.rotation import rotated


@triton.constexpr_function
def lanes(width):
    """The number of columns that a matrix product uses for WIDTH columns."""
    return max(16, 1 << (width - 1).bit_length())


@triton.jit
def plane_bytes(codes, place, there, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Codes (32, columns) that belong to `place` (columns,), where they are `there` -> bytes (32, lanes(WIDTH)) of
    planes of WIDTH bytes (formats/parts/planes.py)."""
    column = tl.arange(0, lanes(WIDTH))
    mine = there[:, None] & ((place % WIDTH)[:, None] == column[None, :])
    weight = tl.where(mine, (1 << (place // WIDTH * BITS))[:, None], 0)
    return tl.dot(codes.to(tl.float16), weight.to(tl.float16)).to(tl.int32)


@triton.jit
def _number(x):
    """The number of true elements up to and including each."""
    return tl.associative_scan(x.to(tl.int32), 0, tl.standard._sum_combine)


@triton.jit
def _count(x):
    return tl.reduce(x.to(tl.int32), 0, tl.standard._sum_combine)


@triton.jit
def _largest(x, COUNT: tl.constexpr):
    """Marks the COUNT largest of float32 numbers, the first of equals; negative ones never count.

    Non-negative floats have the same order as their bits read as integers, so the threshold is found bit by bit.
    """
    key = x.to(tl.int32, bitcast=True)
    least = tl.full((), 0, tl.int32)
    for bit in range(31):
        more = least | (1 << (30 - bit))
        least = tl.where(_count(key >= more) >= COUNT, more, least)
    above, equal = key > least, key == least
    return above | (equal & (_number(equal) <= COUNT - _count(above)))


@triton.jit
def _boosted_codes(x, real, top, FITTED: tl.constexpr):
    """(codes, scales, zeros) of 32 tokens, each channel separately; the last two as float16 stores them."""
    low = tl.reduce(x, 0, tl.standard._elementwise_min)
    high = tl.reduce(x, 0, tl.standard._elementwise_max)
    if FITTED:
        scale, zero = fitted_parameters(x, real[None, :], low, high, top, 32, 0)
    else:
        scale, zero = range_parameters(low, high, top)
    return affine_to(x, scale[None, :], zero[None, :], top[None, :]), scale, zero


@triton.jit
def boosted_keys(tokens, slab, state, head, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Kitty (formats/methods/kitty.py) and, with a rank, SQuat's correction (squat.py), whose blocks are taken from the
    whole tile: it is quantized once per block, usually twice. Returns how many values were replaced."""
    parts: tl.constexpr = (R.d + K.update - 1) // K.update
    base, base16 = slab
    channel = tl.arange(0, R.columns)
    raw = load_channels(tokens, channel, R.head)
    damage, x = lost(raw), clean(raw)
    real = channel < R.d
    span = tl.reduce(x, 0, tl.standard._elementwise_max) - tl.reduce(x, 0, tl.standard._elementwise_min)
    wide = _largest(tl.where(real, span, -1.0), K.boosted)
    top = tl.where(wide, 15.0, 3.0)
    code, scale, zero = _boosted_codes(x, real, top, K.fitted)
    if K.rank > 0:
        u = subspace(state, head, 0, R, K, C, R.columns)
        z = tl.full((32, RANKS), 0.0, tl.float32)
        for t in tl.static_range(1, parts):
            # what the block before this one did
            before = (channel >= (t - 1) * K.update) & (channel < t * K.update)
            error = tl.where(before[None, :], zero[None, :] + code * scale[None, :] - x, 0.0)
            z = tl.dot(error, tl.trans(u), z, input_precision="ieee")
            m = pull(state, head, t * K.update, R, K, C)
            y = clean(x - tl.dot(tl.dot(z, m, input_precision="ieee"), u, input_precision="ieee"))
            own_code, own_scale, own_zero = _boosted_codes(y, real, top, K.fitted)
            rest = channel >= t * K.update
            code = tl.where(rest[None, :], own_code, code)
            scale, zero = tl.where(rest, own_scale, scale), tl.where(rest, own_zero, zero)
    digits = code.to(tl.int32)
    tl.store(base16 + K.scale + channel, tl.where(wide, -scale, scale).to(tl.float16), mask=real)
    tl.store(base16 + K.zero + channel, zero.to(tl.float16), mask=real)
    store_keys(base, plane_bytes(digits & 3, channel, real, R.d // 4, 2), 0, K.codes, R.d // 16)
    store_keys(base, plane_bytes(digits >> 2, _number(wide) - 1, wide, K.boosted // 4, 2), 0, K.high, K.boosted // 16)
    return damage


@triton.jit
def tile_values(tokens, slab, R: tl.constexpr, V: tl.constexpr):
    """Per token over V.group channels (formats/methods/values.py). Returns how many values were replaced."""
    groups: tl.constexpr = (R.d + V.group - 1) // V.group
    width: tl.constexpr = R.d * V.bits // 8
    base, base16 = slab
    token, channel = tl.arange(0, 32), tl.arange(0, R.columns)
    raw = load_channels(tokens, channel, R.head)
    damage, x = lost(raw), clean(raw)
    if V.rotated > 0:
        x = rotated(x, V.rotated)
    code = tl.full((32, R.columns), 0.0, tl.float32)
    for g in tl.static_range(groups):
        inside = ((channel >= g * V.group) & (channel < min((g + 1) * V.group, R.d)))[None, :]
        low = tl.reduce(tl.where(inside, x, 65504.0), 1, tl.standard._elementwise_min)
        high = tl.reduce(tl.where(inside, x, -65504.0), 1, tl.standard._elementwise_max)
        if V.fitted:
            scale, zero = fitted_parameters(
                x, inside, low, high, top_of(low, V.bits), min(V.group, R.d - g * V.group), 1
            )
        else:
            scale, zero = parameters(low, high, V.bits)
        tl.store(base16 + V.scale + g * 32 + token, scale.to(tl.float16))
        tl.store(base16 + V.zero + g * 32 + token, zero.to(tl.float16))
        code = tl.where(inside, affine(x, scale[:, None], zero[:, None], V.bits), code)
    store_values(base, plane_bytes(code, channel, channel < R.d, width, V.bits), 0, width, V.codes)
    return damage

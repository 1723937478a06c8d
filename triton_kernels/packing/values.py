# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Packs the values of one slab; also the functions that all packing shares: loading tokens, affine parameters, codes.

zero = min, scale = (max - min) / (2^b - 1), code = round((x - zero) / scale)    with scale and zero as stored
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import ROUND, TINY, clean, lost


@triton.jit
def load_channels(tokens, channel, HEAD: tl.constexpr):
    """Raw float32 (tokens, channels); padding channels are zero.

    `tokens`: their addresses in the ring, and whether they are there; the same of the step's new tokens.
    """
    ring, ringed, new, fresh = tokens
    real = (channel < HEAD)[None, :]
    old = tl.load(ring[:, None] + channel[None, :], mask=ringed[:, None] & real, other=0.0)
    x = tl.load(new[:, None] + channel[None, :], mask=fresh[:, None] & real, other=0.0)
    return tl.where(ringed[:, None], old, x).to(tl.float32)


@triton.jit
def positive_half(x):
    return tl.maximum(tl.minimum(x, 65504.0).to(tl.float16).to(tl.float32), TINY)


@triton.jit
def levels(x, BITS: tl.constexpr):
    """x / (2^b - 1), rounded once."""
    return tl.div_rn(x, top_of(x, BITS))


@triton.jit
def top_of(x, BITS: tl.constexpr):
    """The largest code of b bits, for each of x."""
    return tl.full(x.shape, (1 << BITS) - 1, tl.float32)


@triton.jit
def range_parameters(low, high, top):
    """(scale, zero) as float16 stores them, in float32, for codes up to `top`."""
    return positive_half(tl.div_rn(high - low, top)), low.to(tl.float16).to(tl.float32)


@triton.jit
def parameters(low, high, BITS: tl.constexpr):
    return range_parameters(low, high, top_of(low, BITS))


@triton.jit
def rounded(x, scale):
    """x / scale to the nearest whole number, ties to even."""
    x, scale = tl.broadcast(x, scale)
    return (tl.div_rn(x, scale) + ROUND) - ROUND


@triton.jit
def affine_to(x, scale, zero, top):
    """Whole float32 codes up to `top`."""
    x, scale = tl.broadcast(x - zero, scale)
    code = tl.minimum(tl.maximum(tl.div_rn(x, scale), 0.0), top)
    return (code + ROUND) - ROUND


@triton.jit
def affine(x, scale, zero, BITS: tl.constexpr):
    return affine_to(x, scale, zero, (1 << BITS) - 1)


@triton.jit
def store_values(base, data, FIRST, PLANE: tl.constexpr, CODES: tl.constexpr):
    """Bytes (32 tokens, channels of a plane) as int32 -> words of 4 tokens, from channel FIRST of the plane on.
    Columns beyond the plane are left out."""
    width: tl.constexpr = data.shape[1]
    eight, four, column = tl.arange(0, 8), tl.arange(0, 4), tl.arange(0, width)
    data = tl.reshape(data, (8, 4, width)) << (8 * four)[None, :, None]
    word = tl.reduce(data, 1, tl.standard._sum_combine)
    place = base + CODES + eight[:, None] * PLANE + FIRST + column[None, :]
    if width > PLANE:
        tl.store(place, word, mask=(column < PLANE)[None, :])
    else:
        tl.store(place, word)


@triton.jit
def token_values(tokens, slab, R: tl.constexpr, V: tl.constexpr):
    """Per token over GROUP channels. Returns how many values were replaced."""
    groups: tl.constexpr = (R.d + V.group - 1) // V.group
    planes: tl.constexpr = 8 // V.bits
    block: tl.constexpr = V.block
    base, base16 = slab
    width: tl.constexpr = R.d * V.bits // 8
    token = tl.arange(0, 32)
    damage = tl.full((), 0, tl.int32)
    scales, zeros = (), ()
    for g in tl.static_range(groups):
        low = tl.full((32,), 65504.0, tl.float32)
        high = -low
        for c in tl.static_range(g * V.group, min((g + 1) * V.group, R.d), block):
            raw = load_channels(tokens, c + tl.arange(0, block), R.head)
            damage += lost(raw)
            x = clean(raw)
            low = tl.minimum(low, tl.reduce(x, 1, tl.standard._elementwise_min))
            high = tl.maximum(high, tl.reduce(x, 1, tl.standard._elementwise_max))
        scale, zero = parameters(low, high, V.bits)
        scales, zeros = scales + (scale,), zeros + (zero,)
        tl.store(base16 + V.scale + g * 32 + token, scale.to(tl.float16))
        tl.store(base16 + V.zero + g * 32 + token, zero.to(tl.float16))
    for o in tl.static_range(0, width, block):
        data = tl.full((32, block), 0, tl.int32)
        for p in tl.static_range(planes):
            x = clean(load_channels(tokens, p * width + o + tl.arange(0, block), R.head))
            scale, zero = scales[(p * width + o) // V.group], zeros[(p * width + o) // V.group]
            data |= affine(x, scale[:, None], zero[:, None], V.bits).to(tl.int32) << (p * V.bits)
        store_values(base, data, o, width, V.codes)
    return damage


@triton.jit
def hybrid_choice(x, AXIS: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr):
    """InnerQ's mode of each group along AXIS: (scale, float32 zero, symmetric), see formats/methods/innerq.py.

    MODE 0 takes the better one of each group, 1 is symmetric, 2 asymmetric.
    """
    top: tl.constexpr = (1 << BITS) - 1
    low = tl.reduce(x, AXIS, tl.standard._elementwise_min)
    high = tl.reduce(x, AXIS, tl.standard._elementwise_max)
    scale, _ = parameters(low, high, BITS)
    wide = positive_half(levels(tl.maximum(tl.abs(low), tl.abs(high)), BITS))
    zero, narrow, broad = tl.expand_dims(low, AXIS), tl.expand_dims(scale, AXIS), tl.expand_dims(wide, AXIS)
    error = zero + affine(x, narrow, zero, BITS) * narrow - x
    signed = tl.minimum(tl.maximum(rounded(x, broad), -top), top)
    other = signed * broad - x
    error = tl.reduce(error * error, AXIS, tl.standard._sum_combine)
    symmetric = tl.reduce(other * other, AXIS, tl.standard._sum_combine) < error
    if MODE != 0:
        symmetric = tl.full(error.shape, MODE == 1, tl.int1)
    return tl.where(symmetric, wide, scale), low, symmetric


@triton.jit
def hybrid_codes(x, scale, zero, symmetric, BITS: tl.constexpr):
    """(codes, sign bits) int32 of x; the parameters are broadcast to it."""
    top: tl.constexpr = (1 << BITS) - 1
    signed = tl.minimum(tl.maximum(rounded(x, scale), -top), top).to(tl.int32)
    plain = affine(x, scale, zero, BITS).to(tl.int32)
    return tl.where(symmetric, signed & top, plain), (signed >= 0).to(tl.int32)


@triton.jit
def hybrid_values(tokens, slab, R: tl.constexpr, V: tl.constexpr):
    """InnerQ: per channel over the slab's tokens."""
    planes: tl.constexpr = 8 // V.bits
    block: tl.constexpr = V.block
    base, base16 = slab
    width: tl.constexpr = R.d * V.bits // 8
    token, column = tl.arange(0, 32), tl.arange(0, block)
    damage = tl.full((), 0, tl.int32)
    for o in tl.static_range(0, width, block):
        data = tl.full((32, block), 0, tl.int32)
        for p in tl.static_range(planes):
            raw = load_channels(tokens, p * width + o + tl.arange(0, block), R.head)
            damage += lost(raw)
            x = clean(raw)
            scale, zero, symmetric = hybrid_choice(x, 0, V.bits, V.mode)
            code, sign = hybrid_codes(x, scale[None, :], zero[None, :], symmetric[None, :], V.bits)
            data |= code << (p * V.bits)
            # element e at bit 8 (e % 4) + e / 4
            signs = tl.reduce(sign << (8 * (token % 4) + token // 4)[:, None], 0, tl.standard._sum_combine)
            channel = p * width + o + column
            tl.store(base16 + V.scale + channel, tl.where(symmetric, -scale, scale).to(tl.float16))
            tl.store(base + V.slot + channel, tl.where(symmetric, signs, zero.to(tl.int32, bitcast=True)))
        store_values(base, data, o, width, V.codes)
    return damage

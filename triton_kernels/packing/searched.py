"""Packs what has one searched scale per token (formats/parts/search.py): transformed keys, rotated values.

A slab is one tile, as in tile.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.formats.parts import scales, search
from vllm_kvq.triton_kernels.lang import ROUND, TINY, clean, lost, row_sum
from vllm_kvq.triton_kernels.packing.keys import store_keys
from vllm_kvq.triton_kernels.packing.tile import lanes, plane_bytes
from vllm_kvq.triton_kernels.packing.values import load_channels, store_values
from vllm_kvq.triton_kernels.rotation import rotated
from vllm_kvq.triton_kernels.turning import mean_of

FACTORS: tl.constexpr = tl.constexpr(search.FACTORS)
TRIED: tl.constexpr = tl.constexpr(len(search.FACTORS))
LEAST: tl.constexpr = tl.constexpr(search.LEAST)
SHIFT: tl.constexpr = tl.constexpr(scales.SHIFT)
LARGEST: tl.constexpr = tl.constexpr(scales.LARGEST)
AROUND: tl.constexpr = tl.constexpr(scales.AROUND)

ROWS: tl.constexpr = tl.constexpr(16)
"""Channels of a key that are transformed, and bytes of a plane that are collected, at a time."""


@triton.jit
def _first_around(scale):
    """The byte of the first of four scales around a number (formats/parts/scales.py)."""
    half = tl.minimum(tl.maximum(scale, 0.0), 65504.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.minimum(tl.maximum((half >> SHIFT) - 1, 1), LARGEST - AROUND + 1)


@triton.jit
def _scale_of(byte):
    return (byte << SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _store_scales(words_ptr, byte):
    word = tl.reduce(tl.reshape(byte, (8, 4)) << (tl.arange(0, 4) * 8)[None, :], 1, tl.standard._sum_combine)
    tl.store(words_ptr + tl.arange(0, 8), word)


@triton.jit
def _factor(i):
    found = tl.full((), 0.0, tl.float32)
    for j in tl.static_range(TRIED):
        found = tl.where(i == j, FACTORS[j], found)
    return found


@triton.jit
def _codes(y, scale, step, most):
    place = tl.div_rn(y, scale[:, None] * tl.maximum(step, 1e-9)[None, :]) + (most * 0.5)[None, :]
    return (tl.minimum(tl.maximum(place, 0.0), most[None, :]) + ROUND) - ROUND


@triton.jit
def _levels(y, scale, step, most):
    return (_codes(y, scale, step, most) - (most * 0.5)[None, :]) * step[None, :]


@triton.jit
def _error(y, scale, step, most, weight):
    off = _levels(y, scale, step, most) * scale[:, None] - y
    return row_sum(off * off * weight[None, :])


@triton.jit
def _searched(y, step, most, weight):
    """Whole float32 codes of rows (32, columns), and the bytes (32,) of their scales. step, most and weight are of the
    channels; those whose largest code, `most`, is 0 are not stored."""
    stored = most > 0
    count = tl.reduce(stored.to(tl.float32), 0, tl.standard._sum_combine)
    rms = tl.sqrt_rn(tl.div_rn(row_sum(tl.where(stored[None, :], y * y, 0.0)), tl.full((32,), 1.0, tl.float32) * count))
    least = tl.full((32,), float("inf"), tl.float32)
    best = tl.full((32,), 0.0, tl.float32)
    for i in range(TRIED):  # a loop of the kernel: unrolled, it takes more registers than there are
        scale = tl.maximum(rms * _factor(i), TINY)
        error = _error(y, scale, step, most, weight)
        better = error < least
        least, best = tl.where(better, error, least), tl.where(better, scale, best)
    level = _levels(y, best, step, most)
    weighed = level * weight[None, :]
    byte = _first_around(tl.div_rn(row_sum(y * weighed), tl.maximum(row_sum(level * weighed), LEAST)))
    first, least = byte, tl.full((32,), float("inf"), tl.float32)
    for i in range(AROUND):
        error = _error(y, _scale_of(first + i), step, most, weight)
        byte, least = tl.where(error < least, first + i, byte), tl.minimum(error, least)
    return _codes(y, _scale_of(byte), step, most), byte


@triton.jit
def transformed_keys(tokens, slab, number, table, slots, turn, R: tl.constexpr, K: tl.constexpr):
    """`table` and `slots`: the head's, `turn`: the layer's, see kernels/gpu/triton/transformed.py; `number`: the slab's
    among the request's. Returns how many values were replaced."""
    planes: tl.constexpr = 8 // K.bits
    base, _ = slab
    width: tl.constexpr = K.slots * K.bits // 8
    some: tl.constexpr = min(ROWS, lanes(width))
    channel = tl.arange(0, R.columns)
    real = channel < R.d
    damage = tl.full((), 0, tl.int32)
    y = tl.full((32, R.columns), 0.0, tl.float32)
    for first in range(0, R.d, ROWS):
        row = first + tl.arange(0, ROWS)
        raw = load_channels(tokens, row, R.head)
        damage += lost(raw)
        forward = tl.load(table + (3 + row)[:, None] * R.d + channel[None, :], mask=real[None, :], other=0.0)
        mean = mean_of(table + (3 + R.d) * R.d, turn, number, row, row < R.d, R.d, ROWS)
        y = tl.dot(clean(raw) - mean[None, :], forward, y, input_precision="ieee")
    weight = tl.load(table + channel, mask=real, other=0.0)
    step = tl.load(table + R.d + channel, mask=real, other=0.0)
    most = tl.load(table + 2 * R.d + channel, mask=real, other=0.0)
    code, byte = _searched(y, step, most, weight)
    _store_scales(base + K.scale, byte)
    code = code.to(tl.float16)
    for first in tl.static_range(0, width, some):
        at = first + tl.arange(0, some)
        data = tl.full((32, some), 0, tl.int32)
        for p in tl.static_range(planes):
            slot = tl.load(slots + p * width + at, mask=at < width, other=-1)
            mine = (slot >> K.bits)[None, :] == channel[:, None]
            found = tl.dot(code, tl.where(mine, 1.0, 0.0).to(tl.float16)).to(tl.int32)
            digit = (found >> ((slot & ((1 << K.bits) - 1)) * K.bits)[None, :]) & ((1 << K.bits) - 1)
            data |= digit << (p * K.bits)
        store_keys(base, data, first, K.codes, min(some, width - first) // 4)
    return damage


@triton.jit
def searched_values(tokens, slab, R: tl.constexpr, V: tl.constexpr):
    """Returns how many values were replaced."""
    base, _ = slab
    channel = tl.arange(0, R.columns)
    raw = load_channels(tokens, channel, R.head)
    real = channel < R.d
    ones = tl.where(real, 1.0, 0.0)
    y = rotated(clean(raw), V.rotated)
    code, byte = _searched(y, ones * V.step, ones * (-2 * V.middle), ones)
    _store_scales(base + V.scale, byte)
    digits = code.to(tl.int32)
    low: tl.constexpr = R.d * V.bits // 8
    store_values(base, plane_bytes(digits & ((1 << V.bits) - 1), channel, real, low, V.bits), 0, low, V.codes)
    if V.high > 0:
        store_values(base, plane_bytes(digits >> V.bits, channel, real, R.d // 8, 1), 0, R.d // 8, V.high)
    return lost(raw)

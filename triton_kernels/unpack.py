"""Packed pages back into plain keys and values, for long chunks of prompts over their history (kernels/gpu/history.py).

One program unpacks one slab of one KV head. Decoding reads codes where they lie; here, where memory traffic decides and
everything is read once, each channel looks its own code up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import byte_scales
from vllm_kvq.triton_kernels.keys.polar import CIRCLE
from vllm_kvq.triton_kernels.lang import LIMIT, MAGIC, cos_sin
from vllm_kvq.triton_kernels.rotation import rotated
from vllm_kvq.triton_kernels.turning import mean_of, page_slab


@triton.jit(do_not_specialize=["pages", "low", "high"])
def unpack_kernel(
    words_ptr,
    halves_ptr,
    ids_ptr,
    key_ptr,
    value_ptr,
    faults_ptr,
    back_ptr,
    turn_ptr,
    pages,
    low,
    high,
    page_words,
    head_words,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """The pages of ids_ptr -> (their tokens, heads, HEAD), dense. Grid: (their slabs, heads).

    Slabs with a token in [low, high), counted from the first page on, must be packed: faults_ptr counts the others.
    What was never packed becomes 0. back_ptr and turn_ptr: the tables of kernels/gpu/triton/transformed.py.
    """
    at, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slab = at % R.slabs
    page = tl.load(ids_ptr + at // R.slabs).to(tl.int64)
    ok = (page > 0) & (page < pages)
    record = tl.where(ok, page, 0) * page_words + head * head_words
    page_halves = halves_ptr + record * 2
    flags = tl.load(words_ptr + record + 4 + slab // 4) >> (slab % 4 * 8)
    live = ok & (tl.load(words_ptr + record) == MAGIC) & ((flags & 255) == 1)
    needed = (at * 32 < high) & (at * 32 + 32 > low)
    tl.atomic_add(faults_ptr, 1, mask=needed & (live == 0))
    words = words_ptr + record + R.slabs_at + slab * R.slab_words
    halves = page_halves + (R.slabs_at + slab * R.slab_words) * 2
    there = tl.arange(0, R.columns) < tl.where(live, R.d, 0)
    if K.channel:
        key = _channel_keys(words, halves, there, R, K)
    elif K.hybrid:
        key = _hybrid_keys(words, halves, page_halves, there, R, K)
    elif K.transformed:
        back = back_ptr + head * ((K.slots + R.d) * R.d)
        number = page_slab(words_ptr + record) + slab
        mean = mean_of(back + K.slots * R.d, turn_ptr, number, tl.arange(0, R.columns), there, R.d, 16)
        key = _transformed_keys(words, back, mean, there, live, R, K)
    else:
        key = _polar_keys(words, page_halves, there, R, K)
    if V.by_token:
        value = _token_values(words, halves, there, R, V)
    else:
        value = _hybrid_values(words, halves, there, R, V)
    column = tl.arange(0, R.columns)[None, :]
    target = ((at * 32 + tl.arange(0, 32)).to(tl.int64) * heads + head)[:, None] * R.head + column
    tl.store(key_ptr + target, key, mask=column < R.head)
    tl.store(value_ptr + target, value, mask=column < R.head)


@triton.jit
def _key_codes(codes_ptr, index, there, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Codes (32 tokens, indices) of keys (formats/parts/planes.py): of `index`, one per column, below COUNT."""
    plane: tl.constexpr = COUNT * BITS // 8
    place = index % plane
    words = tl.load(codes_ptr + (place // 4 * 32)[None, :] + tl.arange(0, 32)[:, None], mask=there[None, :], other=0)
    return (words >> (place % 4 * 8 + index // plane * BITS)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _value_codes(codes_ptr, there, D: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Codes (32 tokens, channels) of values."""
    plane: tl.constexpr = D * BITS // 8
    token, channel = tl.arange(0, 32)[:, None], tl.arange(0, COLUMNS)[None, :]
    words = tl.load(codes_ptr + token // 4 * plane + channel % plane, mask=there[None, :], other=0)
    return (words >> (token % 4 * 8 + channel // plane * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _channel_keys(words, halves, there, R: tl.constexpr, K: tl.constexpr):
    channel = tl.arange(0, R.columns)
    codes = _key_codes(words + K.codes, channel, there, R.d, K.bits)
    scale = tl.load(halves + K.scale + channel, mask=there, other=0.0)
    zero = tl.load(halves + K.zero + channel, mask=there, other=0.0).to(tl.float32)
    if K.boosted > 0:
        boosted = tl.where(scale.to(tl.int16, bitcast=True) < 0, 1, 0)
        rank = tl.associative_scan(boosted, 0, tl.standard._sum_combine) - boosted
        high = _key_codes(words + K.high, rank, (boosted > 0) & (rank < K.boosted), K.boosted, 2)
        codes += high << K.bits
        scale = tl.abs(scale)
    return zero[None, :] + scale.to(tl.float32)[None, :] * codes.to(tl.float32)


@triton.jit
def _transformed_keys(words, back, mean, there, live, R: tl.constexpr, K: tl.constexpr):
    slots: tl.constexpr = K.slots
    channel = tl.arange(0, R.columns)
    key = tl.full((32, R.columns), 0.0, tl.float32)
    for first in tl.static_range(0, slots, 16):
        slot = first + tl.arange(0, 16)
        digit = _key_codes(words + K.codes, slot, slot < tl.where(live, K.slots, 0), K.slots, K.bits)
        row = tl.load(back + slot[:, None] * R.d + channel[None, :], mask=there[None, :], other=0.0)
        key = tl.dot(digit.to(tl.float32) - 1.5, row, key, input_precision="ieee")
    token = tl.arange(0, 32)
    scale = byte_scales(words + K.scale, token // 4, token % 4, token < tl.where(live, 32, 0))
    return tl.minimum(tl.maximum(key * scale.to(tl.float32)[:, None] + mean[None, :], -LIMIT), LIMIT)


@triton.jit
def _token_values(words, halves, there, R: tl.constexpr, V: tl.constexpr):
    """Searched values, too: see values.py."""
    codes = _value_codes(words + V.codes, there, R.d, R.columns, V.bits)
    if V.high > 0:
        codes |= _value_codes(words + V.high, there, R.d, R.columns, 1) << V.bits
    if V.searched:
        token = tl.broadcast_to(tl.arange(0, 32)[:, None], (32, R.columns))
        scale = byte_scales(words + V.scale, token // 4, token % 4, there[None, :]).to(tl.float32)
        zero = scale
    else:
        place = halves + (tl.arange(0, R.columns) // V.group * 32)[None, :] + tl.arange(0, 32)[:, None]
        scale = tl.load(place + V.scale, mask=there[None, :], other=0.0).to(tl.float32)
        zero = tl.load(place + V.zero, mask=there[None, :], other=0.0).to(tl.float32)
    value = (zero * V.middle + scale * codes.to(tl.float32)) * V.step
    if V.rotated > 0:
        value = tl.minimum(tl.maximum(rotated(value, V.rotated) * V.rotated, -LIMIT), LIMIT)
    return value


@triton.jit
def _hybrid(codes, mode, slot, element, BITS: tl.constexpr):
    """InnerQ's groups (formats/methods/innerq.py): `mode` and `slot` of each code's group, `element` its place."""
    symmetric = mode.to(tl.int16, bitcast=True) < 0
    sign = (slot >> (element % 4 * 8 + element // 4)) & 1
    signed = codes + tl.where(symmetric, (sign - 1) * (1 << BITS), 0)
    zero = tl.where(symmetric, 0.0, slot.to(tl.float32, bitcast=True))
    return zero + signed.to(tl.float32) * tl.abs(mode).to(tl.float32)


@triton.jit
def _hybrid_keys(words, halves, page_halves, there, R: tl.constexpr, K: tl.constexpr):
    channel = tl.arange(0, R.columns)
    codes = _key_codes(words + K.codes, channel, there, R.d, K.bits)
    place = (channel // 32 * 32)[None, :] + tl.arange(0, 32)[:, None]
    mode = tl.load(halves + K.scale + place, mask=there[None, :], other=0.0)
    slot = tl.load(words + K.slot + place, mask=there[None, :], other=0)
    norm = tl.load(page_halves + K.norm + channel, mask=there, other=0.0).to(tl.float32)
    return _hybrid(codes, mode, slot, (channel % 32)[None, :], K.bits) * norm[None, :]


@triton.jit
def _hybrid_values(words, halves, there, R: tl.constexpr, V: tl.constexpr):
    channel = tl.arange(0, R.columns)
    codes = _value_codes(words + V.codes, there, R.d, R.columns, V.bits)
    mode = tl.load(halves + V.scale + channel, mask=there, other=0.0)
    slot = tl.load(words + V.slot + channel, mask=there, other=0)
    return _hybrid(codes, mode[None, :], slot[None, :], tl.arange(0, 32)[:, None], V.bits)


@triton.jit
def _polar_keys(words, page_halves, there, R: tl.constexpr, K: tl.constexpr):
    """Each pair is read by both of its channels."""
    pairs: tl.constexpr = R.d // 2
    half: tl.constexpr = K.rotary // 2
    channel = tl.arange(0, R.columns)
    if K.interleaved:
        pair, second = channel // 2, channel % 2
    else:
        pair, second = channel % half, channel // half
    if K.rotary < R.d:  # pairs outside RoPE, as in formats/methods/polar.py
        rest: tl.constexpr = (R.d - K.rotary) // 2
        beyond = channel - K.rotary
        pair = tl.where(beyond < 0, pair, half + beyond % rest)
        second = tl.where(beyond < 0, second, beyond // rest)
    if K.bits + K.radius_bits == 8:  # they share a byte
        both = _key_codes(words + K.codes, pair, there, pairs, 8)
        angle, radius = both & ((1 << K.bits) - 1), (both >> K.bits) & ((1 << K.radius_bits) - 1)
    else:
        angle = _key_codes(words + K.codes, pair, there, pairs, K.bits)
        radius = _key_codes(words + K.radius, pair, there, pairs, K.radius_bits)
    place = page_halves + pair
    r_step = tl.load(place + K.radius_step, mask=there, other=0.0).to(tl.float32)[None, :]
    if K.paper:
        r = radius.to(tl.float32) * r_step
        cos, sin = cos_sin(angle.to(tl.float32) * (CIRCLE / (1 << K.bits)))
    else:
        r_first = tl.load(place + K.radius0, mask=there, other=0.0).to(tl.float32)[None, :]
        a_first = tl.load(place + K.angle0, mask=there, other=0.0).to(tl.float32)[None, :]
        a_step = tl.load(place + K.angle_step, mask=there, other=0.0).to(tl.float32)[None, :]
        r = r_first + (radius.to(tl.float32) + 0.5) * r_step
        cos, sin = cos_sin(a_first + (angle.to(tl.float32) + 0.5) * a_step)
    return r * tl.where(second[None, :] > 0, sin, cos)

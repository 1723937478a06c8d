"""Packed pages back into plain keys and values, for long chunks of prompts over their history (kernels/gpu/history.py).

One program unpacks one slab of one KV head. Decoding reads codes where they lie; here, where memory traffic decides and
everything is read once, each channel looks its own code up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.keys.channel import CHANNEL, HYBRID, TRANSFORMED
from vllm_kvq.triton_kernels.keys.polar import CIRCLE
from vllm_kvq.triton_kernels.lang import LIMIT, MAGIC, cos_sin
from vllm_kvq.triton_kernels.rotation import rotated
from vllm_kvq.triton_kernels.values import TOKEN


@triton.jit(do_not_specialize=["pages", "low", "high"])
def unpack_kernel(
    words_ptr,
    halves_ptr,
    ids_ptr,
    key_ptr,
    value_ptr,
    faults_ptr,
    back_ptr,
    pages,
    low,
    high,
    page_words,
    head_words,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLABS: tl.constexpr,
    SLABS_AT: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    KEYS: tl.constexpr,
    K_BITS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    PAPER: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HIGH: tl.constexpr,
    BOOSTED: tl.constexpr,
    SLOTS: tl.constexpr,
    K_RADIUS: tl.constexpr,
    K_NORM: tl.constexpr,
    K_ANGLE0: tl.constexpr,
    K_ANGLE_STEP: tl.constexpr,
    K_RADIUS0: tl.constexpr,
    K_RADIUS_STEP: tl.constexpr,
    VALUES: tl.constexpr,
    V_BITS: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_ROTATED: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_MIDDLE: tl.constexpr,
    V_STEP: tl.constexpr,
):
    """The pages of ids_ptr -> (their tokens, heads, HEAD), dense. Grid: (their slabs, heads).

    Slabs with a token in [low, high), counted from the first page on, must be packed: faults_ptr counts the others.
    What was never packed becomes 0. COLUMNS is the power of two that holds D. back_ptr: transformed keys' table
    (kernels/gpu/transformed.py).
    """
    at, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slab = at % SLABS
    page = tl.load(ids_ptr + at // SLABS).to(tl.int64)
    ok = (page > 0) & (page < pages)
    record = tl.where(ok, page, 0) * page_words + head * head_words
    page_halves = halves_ptr + record * 2
    flags = tl.load(words_ptr + record + 4 + slab // 4) >> (slab % 4 * 8)
    live = ok & (tl.load(words_ptr + record) == MAGIC) & ((flags & 255) == 1)
    needed = (at * 32 < high) & (at * 32 + 32 > low)
    tl.atomic_add(faults_ptr, 1, mask=needed & (live == 0))
    words = words_ptr + record + SLABS_AT + slab * SLAB_WORDS
    halves = page_halves + (SLABS_AT + slab * SLAB_WORDS) * 2
    there = tl.arange(0, COLUMNS) < tl.where(live, D, 0)
    if KEYS == CHANNEL:
        key = _channel_keys(words, halves, there, D, COLUMNS, K_BITS, K_CODES, K_SCALE, K_ZERO, K_HIGH, BOOSTED)
    elif KEYS == HYBRID:
        key = _hybrid_keys(words, halves, page_halves, there, D, COLUMNS, K_BITS, K_CODES, K_SCALE, K_SLOT, K_NORM)
    elif KEYS == TRANSFORMED:
        back = back_ptr + head * ((SLOTS + 1) * D)
        key = _transformed_keys(words, halves, back, there, live, D, COLUMNS, SLOTS, K_BITS, K_CODES, K_SCALE)
    else:
        key = _polar_keys(
            words, page_halves, there,
            D, COLUMNS, K_BITS, RADIUS_BITS, ROTARY, INTERLEAVED, PAPER, K_CODES, K_RADIUS,
            K_ANGLE0, K_ANGLE_STEP, K_RADIUS0, K_RADIUS_STEP,
        )  # fmt: skip
    if VALUES == TOKEN:
        value = _token_values(
            words, halves, there,
            D, COLUMNS, V_BITS, V_GROUP, V_ROTATED, V_CODES, V_SCALE, V_ZERO, V_HIGH, V_MIDDLE, V_STEP,
        )  # fmt: skip
    else:
        value = _hybrid_values(words, halves, there, D, COLUMNS, V_BITS, V_CODES, V_SCALE, V_SLOT)
    column = tl.arange(0, COLUMNS)[None, :]
    target = ((at * 32 + tl.arange(0, 32)).to(tl.int64) * heads + head)[:, None] * HEAD + column
    tl.store(key_ptr + target, key, mask=column < HEAD)
    tl.store(value_ptr + target, value, mask=column < HEAD)


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
def _channel_keys(
    words,
    halves,
    there,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH: tl.constexpr,
    BOOSTED: tl.constexpr,
):
    channel = tl.arange(0, COLUMNS)
    codes = _key_codes(words + CODES, channel, there, D, BITS)
    scale = tl.load(halves + SCALE + channel, mask=there, other=0.0)
    zero = tl.load(halves + ZERO + channel, mask=there, other=0.0).to(tl.float32)
    if BOOSTED > 0:
        boosted = tl.where(scale.to(tl.int16, bitcast=True) < 0, 1, 0)
        rank = tl.associative_scan(boosted, 0, tl.standard._sum_combine) - boosted
        high = _key_codes(words + HIGH, rank, (boosted > 0) & (rank < BOOSTED), BOOSTED, 2)
        codes += high << BITS
        scale = tl.abs(scale)
    return zero[None, :] + scale.to(tl.float32)[None, :] * codes.to(tl.float32)


@triton.jit
def _transformed_keys(
    words,
    halves,
    back,
    there,
    live,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
):
    channel = tl.arange(0, COLUMNS)
    key = tl.full((32, COLUMNS), 0.0, tl.float32)
    for first in tl.static_range(0, SLOTS, 16):
        slot = first + tl.arange(0, 16)
        digit = _key_codes(words + CODES, slot, slot < tl.where(live, SLOTS, 0), SLOTS, BITS)
        row = tl.load(back + slot[:, None] * D + channel[None, :], mask=there[None, :], other=0.0)
        key = tl.dot(digit.to(tl.float32) - 1.5, row, key, input_precision="ieee")
    scale = tl.load(halves + SCALE + tl.arange(0, 32), mask=tl.arange(0, 32) < tl.where(live, 32, 0), other=0.0)
    key = key * scale.to(tl.float32)[:, None] + tl.load(back + SLOTS * D + channel, mask=there, other=0.0)[None, :]
    return tl.minimum(tl.maximum(key, -LIMIT), LIMIT)


@triton.jit
def _token_values(
    words,
    halves,
    there,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROTATED: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH: tl.constexpr,
    MIDDLE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Searched values, too: see values.py."""
    codes = _value_codes(words + CODES, there, D, COLUMNS, BITS)
    if HIGH > 0:
        codes |= _value_codes(words + HIGH, there, D, COLUMNS, 1) << BITS
    place = halves + (tl.arange(0, COLUMNS) // GROUP * 32)[None, :] + tl.arange(0, 32)[:, None]
    scale = tl.load(place + SCALE, mask=there[None, :], other=0.0).to(tl.float32)
    zero = tl.load(place + ZERO, mask=there[None, :], other=0.0).to(tl.float32)
    value = (zero * MIDDLE + scale * codes.to(tl.float32)) * STEP
    if ROTATED > 0:
        value = tl.minimum(tl.maximum(rotated(value, ROTATED) * ROTATED, -LIMIT), LIMIT)
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
def _hybrid_keys(
    words,
    halves,
    page_halves,
    there,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
    NORM: tl.constexpr,
):
    channel = tl.arange(0, COLUMNS)
    codes = _key_codes(words + CODES, channel, there, D, BITS)
    place = (channel // 32 * 32)[None, :] + tl.arange(0, 32)[:, None]
    mode = tl.load(halves + SCALE + place, mask=there[None, :], other=0.0)
    slot = tl.load(words + SLOT + place, mask=there[None, :], other=0)
    norm = tl.load(page_halves + NORM + channel, mask=there, other=0.0).to(tl.float32)
    return _hybrid(codes, mode, slot, (channel % 32)[None, :], BITS) * norm[None, :]


@triton.jit
def _hybrid_values(
    words,
    halves,
    there,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
):
    channel = tl.arange(0, COLUMNS)
    codes = _value_codes(words + CODES, there, D, COLUMNS, BITS)
    mode = tl.load(halves + SCALE + channel, mask=there, other=0.0)
    slot = tl.load(words + SLOT + channel, mask=there, other=0)
    return _hybrid(codes, mode[None, :], slot[None, :], tl.arange(0, 32)[:, None], BITS)


@triton.jit
def _polar_keys(
    words,
    page_halves,
    there,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAPER: tl.constexpr,
    CODES: tl.constexpr,
    RADIUS: tl.constexpr,
    ANGLE0: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    RADIUS0: tl.constexpr,
    RADIUS_STEP: tl.constexpr,
):
    """Each pair is read by both of its channels."""
    pairs: tl.constexpr = D // 2
    half: tl.constexpr = ROTARY // 2
    channel = tl.arange(0, COLUMNS)
    if INTERLEAVED:
        pair, second = channel // 2, channel % 2
    else:
        pair, second = channel % half, channel // half
    if ROTARY < D:  # pairs outside RoPE, as in formats/methods/polar.py
        rest: tl.constexpr = (D - ROTARY) // 2
        beyond = channel - ROTARY
        pair = tl.where(beyond < 0, pair, half + beyond % rest)
        second = tl.where(beyond < 0, second, beyond // rest)
    if BITS + RADIUS_BITS == 8:  # they share a byte
        both = _key_codes(words + CODES, pair, there, pairs, 8)
        angle, radius = both & ((1 << BITS) - 1), (both >> BITS) & ((1 << RADIUS_BITS) - 1)
    else:
        angle = _key_codes(words + CODES, pair, there, pairs, BITS)
        radius = _key_codes(words + RADIUS, pair, there, pairs, RADIUS_BITS)
    place = page_halves + pair
    r_step = tl.load(place + RADIUS_STEP, mask=there, other=0.0).to(tl.float32)[None, :]
    if PAPER:
        r = radius.to(tl.float32) * r_step
        cos, sin = cos_sin(angle.to(tl.float32) * (CIRCLE / (1 << BITS)))
    else:
        r_first = tl.load(place + RADIUS0, mask=there, other=0.0).to(tl.float32)[None, :]
        a_first = tl.load(place + ANGLE0, mask=there, other=0.0).to(tl.float32)[None, :]
        a_step = tl.load(place + ANGLE_STEP, mask=there, other=0.0).to(tl.float32)[None, :]
        r = r_first + (radius.to(tl.float32) + 0.5) * r_step
        cos, sin = cos_sin(a_first + (angle.to(tl.float32) + 0.5) * a_step)
    return r * tl.where(second[None, :] > 0, sin, cos)

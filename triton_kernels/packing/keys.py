# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Packs the keys of one slab: SQuat or KIVI per channel, and InnerQ per token.

SQuat quantizes block by block, and each block first corrects what the blocks before it did (formats/methods/squat.py):

    x_t = k_t - U_t^T M_{t-1} z,   z += U_t (y_t - k_t),   M = (I rho + U_R U_R^T)^-1 in float64, here

M is rebuilt for every slab from the request's U and its noise: packing is rare, and nothing else needs to be kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import clean, lost
from vllm_kvq.triton_kernels.packing.fitted import fitted_parameters
from vllm_kvq.triton_kernels.packing.values import (
    affine,
    hybrid_choice,
    hybrid_codes,
    load_channels,
    parameters,
    top_of,
)
from vllm_kvq.triton_kernels.step import load_state

RANKS: tl.constexpr = tl.constexpr(16)  # rows of U as a matrix operand; those beyond the rank are zero


@triton.jit
def store_keys(base, data, FIRST, CODES: tl.constexpr, QUADS: tl.constexpr = 0):
    """Bytes (32 tokens, channels of a plane) as int32 -> words of 4 channels, from channel FIRST of the plane on: QUADS
    words per token, or all."""
    width: tl.constexpr = data.shape[1]
    token, four, quad = tl.arange(0, 32), tl.arange(0, 4), tl.arange(0, width // 4)
    data = tl.reshape(data, (32, width // 4, 4)) << (8 * four)[None, None, :]
    word = tl.reduce(data, 2, tl.standard._sum_combine)
    place = base + CODES + (FIRST // 4 + quad)[None, :] * 32 + token[:, None]
    if QUADS == 0 or width == QUADS * 4:
        tl.store(place, word)
    else:
        tl.store(place, word, mask=(quad < QUADS)[None, :])


@triton.jit
def subspace(state, head, FIRST, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """(RANKS, WIDTH) of U, channels from FIRST on."""
    row, column = tl.arange(0, RANKS), FIRST + tl.arange(0, WIDTH)
    index = (head * (K.rank + 1) + row)[:, None] * R.d + column[None, :]
    inside = (row < K.rank)[:, None] & (column < R.d)[None, :]
    return load_state(state, index, inside, C)


@triton.jit
def pull(state, head, FIRST, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """M over the channels from FIRST on, by Gauss-Jordan without pivots (it is positive definite): (RANKS, RANKS)."""
    i = tl.arange(0, RANKS)
    diagonal = i[:, None] == i[None, :]
    noise = load_state(state, (head * (K.rank + 1) + K.rank) * R.d, K.rank > 0, C).to(tl.float64)
    rho = tl.maximum(noise * K.floor, 1.0 / K.lam)
    a = tl.where(diagonal, rho, 0.0)
    for c in range(FIRST, R.d, 16):
        u = subspace(state, head, c, R, K, C, 16).to(tl.float64)
        a += tl.reduce(u[:, None, :] * u[None, :, :], 2, tl.standard._sum_combine)
    for k in range(K.rank):
        column = tl.reduce(tl.where(i[None, :] == k, a, 0.0), 1, tl.standard._sum_combine)
        row = tl.reduce(tl.where(i[:, None] == k, a, 0.0), 0, tl.standard._sum_combine)
        pivot = tl.reduce(tl.where(i == k, column, 0.0), 0, tl.standard._sum_combine)
        rest = a - column[:, None] * row[None, :] / pivot
        on_row, on_column = i[:, None] == k, i[None, :] == k
        rest = tl.where(on_row, row[None, :] / pivot, rest)
        rest = tl.where(on_column, -column[:, None] / pivot, rest)
        a = tl.where(on_row & on_column, 1.0 / pivot, rest)
    inside = (i < K.rank)[:, None] & (i < K.rank)[None, :]
    return tl.where(inside, a, 0.0).to(tl.float32)


@triton.jit
def channel_keys(tokens, slab, state, head, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Per channel over the slab's tokens. K.block channels lie in one plane and one block of K.update channels."""
    blocks: tl.constexpr = R.d // K.block
    planes: tl.constexpr = 8 // K.bits
    base, base16 = slab
    damage = tl.full((), 0, tl.int32)
    z = tl.full((32, RANKS), 0.0, tl.float32)
    newest = z
    codes = ()
    for i in tl.static_range(blocks):
        raw = load_channels(tokens, i * K.block + tl.arange(0, K.block), R.head)
        damage += lost(raw)
        original = clean(raw)
        x = original
        if K.rank > 0:
            u = subspace(state, head, i * K.block, R, K, C, K.block)
            if i * K.block % K.update == 0 and i > 0:
                m = pull(state, head, i * K.block, R, K, C)
                # the blocks before this one
                z = tl.dot(newest, m, input_precision="ieee")
            if i * K.block >= K.update:
                x = clean(x - tl.dot(z, u, input_precision="ieee"))
        low = tl.reduce(x, 0, tl.standard._elementwise_min)
        high = tl.reduce(x, 0, tl.standard._elementwise_max)
        channel = i * K.block + tl.arange(0, K.block)
        if K.fitted:
            scale, zero = fitted_parameters(x, (channel < R.d)[None, :], low, high, top_of(low, K.bits), 32, 0)
        else:
            scale, zero = parameters(low, high, K.bits)
        code = affine(x, scale[None, :], zero[None, :], K.bits)
        codes = codes + (code.to(tl.int32),)
        tl.store(base16 + K.scale + channel, scale.to(tl.float16))
        tl.store(base16 + K.zero + channel, zero.to(tl.float16))
        if K.rank > 0:
            error = zero[None, :] + code * scale[None, :] - original
            newest = tl.dot(error, tl.trans(u), newest, input_precision="ieee")
    for o in tl.static_range(blocks // planes):
        data = codes[o]
        for p in tl.static_range(1, planes):
            data |= codes[o + p * (blocks // planes)] << (p * K.bits)
        store_keys(base, data, o * K.block, K.codes)
    return damage


@triton.jit
def hybrid_keys(tokens, slab, norm_ptr, follows, state, head, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """InnerQ: k / norm, per token over 32 channels. A page keeps the norm with which it was started."""
    groups: tl.constexpr = R.d // 32
    planes: tl.constexpr = 8 // K.bits
    block: tl.constexpr = K.block
    base, base16 = slab
    width: tl.constexpr = R.d * K.bits // 8
    token = tl.arange(0, 32)
    damage = tl.full((), 0, tl.int32)
    scales, zeros, modes = (), (), ()
    for g in tl.static_range(groups):
        raw = load_channels(tokens, g * 32 + tl.arange(0, 32), R.head)
        damage += lost(raw)
        norm = _norm(norm_ptr, follows, state, head, R, K, C, g * 32, 32)
        x, divisor = tl.broadcast(clean(raw), norm[None, :])
        x = tl.div_rn(x, divisor)
        scale, zero, symmetric = hybrid_choice(x, 1, K.bits, K.mode)
        channel = tl.arange(0, 32)
        _, sign = hybrid_codes(x, scale[:, None], zero[:, None], symmetric[:, None], K.bits)
        signs = tl.reduce(sign << (8 * (channel % 4) + channel // 4)[None, :], 1, tl.standard._sum_combine)
        tl.store(norm_ptr + g * 32 + channel, norm.to(tl.float16))
        tl.store(base16 + K.scale + g * 32 + token, tl.where(symmetric, -scale, scale).to(tl.float16))
        tl.store(base + K.slot + g * 32 + token, tl.where(symmetric, signs, zero.to(tl.int32, bitcast=True)))
        scales, zeros, modes = scales + (scale,), zeros + (zero,), modes + (symmetric,)
    for o in tl.static_range(0, width, block):
        data = tl.full((32, block), 0, tl.int32)
        for p in tl.static_range(planes):
            norm = _norm(norm_ptr, follows, state, head, R, K, C, p * width + o, block)
            x = clean(load_channels(tokens, p * width + o + tl.arange(0, block), R.head))
            x, divisor = tl.broadcast(x, norm[None, :])
            x = tl.div_rn(x, divisor)
            scale, zero = scales[(p * width + o) // 32], zeros[(p * width + o) // 32]
            symmetric = modes[(p * width + o) // 32]
            code, _ = hybrid_codes(x, scale[:, None], zero[:, None], symmetric[:, None], K.bits)
            data |= code << (p * K.bits)
        store_keys(base, data, o, K.codes)
    return damage


@triton.jit
def _norm(
    norm_ptr,
    follows,
    state,
    head,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The divisor of each channel, as the page stores it; 1 without K.normed, when there is no state."""
    channel = FIRST + tl.arange(0, WIDTH)
    if K.normed:
        norm = load_state(state, head * R.d + channel, channel < R.d, C)
        stored = tl.minimum(norm, 65504.0).to(tl.float16).to(tl.float32)
        norm = tl.where(norm > 0, tl.maximum(stored, 0.015625), 1.0)  # formats/methods/innerq.py, usable_norm
        norm = tl.where(follows, tl.load(norm_ptr + channel).to(tl.float32), norm)
    else:
        norm = tl.full((WIDTH,), 1.0, tl.float32)
    return norm

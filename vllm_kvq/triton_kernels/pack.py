# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Packs complete slabs of 32 tokens: SQuat or KIVI keys, and per-token values.

    zero = min, scale = (max - min) / (2^b - 1), code = round((x - zero) / scale)    with scale and zero as stored

Keys per channel over the 32 tokens, values per token over a group of channels. SQuat quantizes block by block and each
block first takes back what the blocks before it did (formats/squat.py):

    x_t = k_t - P_t^T z,   z += U_t (y_t - k_t),   P_t = (I / lambda + U_R U_R^T)^-1 U_t   from PyTorch, in float64

One program packs one slab of one KV head. Whether there is anything to pack is decided on the device: a page out of
range is skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import MAGIC, row_sum

LIMIT: tl.constexpr = tl.constexpr(32768.0)  # formats/quant.py
TINY: tl.constexpr = tl.constexpr(2.0**-24)
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to even


@triton.jit
def _load(row, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr):
    """(32, WIDTH) finite float32 channels from FIRST on; padding channels are zero."""
    channel = FIRST + tl.arange(0, WIDTH)
    x = tl.load(row[:, None] + channel[None, :], mask=(channel < HEAD)[None, :], other=0.0).to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def _parameters(low, high, BITS: tl.constexpr):
    """(scale, zero) as float16 stores them, in float32."""
    scale = tl.minimum(tl.div_rn(high - low, tl.full(low.shape, (1 << BITS) - 1, tl.float32)), 65504.0)
    return tl.maximum(scale.to(tl.float16).to(tl.float32), TINY), low.to(tl.float16).to(tl.float32)


@triton.jit
def _codes(x, scale, zero, BITS: tl.constexpr):
    """Whole float32 codes."""
    x, scale = tl.broadcast(x - zero, scale)
    code = tl.minimum(tl.maximum(tl.div_rn(x, scale), 0.0), (1 << BITS) - 1)
    return (code + ROUND) - ROUND


@triton.jit
def pack_kernel(
    key_ptr,
    value_ptr,
    rows_ptr,
    page_ptr,
    slab_ptr,
    subspace_ptr,
    pull_ptr,
    words_ptr,
    halves_ptr,
    bytes_ptr,
    heads,
    pages,
    key_token,
    key_head,
    value_token,
    value_head,
    page_words,
    head_words,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    SLABS_AT: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    RANK: tl.constexpr,
    UPDATE: tl.constexpr,
    K_BITS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_BITS: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
):
    """See the module. Grid: (slabs, heads). K_BLOCK channels lie in one plane and one block of UPDATE channels."""
    unit, head = tl.program_id(0), tl.program_id(1)
    page = tl.load(page_ptr + unit).to(tl.int64)
    if (page >= 0) & (page < pages):
        slab = tl.load(slab_ptr + unit).to(tl.int32)
        record = page * page_words + head * head_words
        base = words_ptr + record + SLABS_AT + slab * SLAB_WORDS
        base16 = halves_ptr + (record + SLABS_AT + slab * SLAB_WORDS) * 2
        token = tl.arange(0, 32)
        row = tl.load(rows_ptr + unit * 32 + token).to(tl.int64)

        # keys
        k_row = key_ptr + row * key_token + head * key_head
        k_width: tl.constexpr = D * K_BITS // 8
        state = (unit * heads + head).to(tl.int64) * (RANK * D)
        z = ()
        for _ in tl.static_range(RANK):
            z = z + (tl.full((32,), 0.0, tl.float32),)
        fresh = z
        codes = ()
        for i in tl.static_range(D // K_BLOCK):
            channel = i * K_BLOCK + tl.arange(0, K_BLOCK)
            if i * K_BLOCK % UPDATE == 0:
                z = fresh  # the blocks before this one
            original = _load(k_row, i * K_BLOCK, K_BLOCK, HEAD)
            x = original
            if i * K_BLOCK >= UPDATE:
                for j in tl.static_range(RANK):
                    x -= z[j][:, None] * tl.load(pull_ptr + state + j * D + channel)[None, :]
            low = tl.reduce(x, 0, tl.standard._elementwise_min)
            high = tl.reduce(x, 0, tl.standard._elementwise_max)
            scale, zero = _parameters(low, high, K_BITS)
            code = _codes(x, scale[None, :], zero[None, :], K_BITS)
            codes = codes + (code.to(tl.int32),)
            tl.store(base16 + K_SCALE + channel, scale.to(tl.float16))
            tl.store(base16 + K_ZERO + channel, zero.to(tl.float16))
            error = zero[None, :] + code * scale[None, :] - original
            newer = ()
            for j in tl.static_range(RANK):
                newer = newer + (fresh[j] + row_sum(error * tl.load(subspace_ptr + state + j * D + channel)[None, :]),)
            fresh = newer
        four = tl.arange(0, 4)
        quad = tl.arange(0, K_BLOCK // 4)
        for o in tl.static_range(k_width // K_BLOCK):
            data = codes[o]
            for p in tl.static_range(1, 8 // K_BITS):
                data |= codes[o + p * (k_width // K_BLOCK)] << (p * K_BITS)
            data = tl.reshape(data, (32, K_BLOCK // 4, 4)) << (8 * four)[None, None, :]
            word = tl.reduce(data, 2, tl.standard._sum_combine)
            place = (o * (K_BLOCK // 4) + quad)[None, :] * 32 + token[:, None]
            tl.store(base + K_CODES + place, word)

        # values
        v_row = value_ptr + row * value_token + head * value_head
        v_width: tl.constexpr = D * V_BITS // 8
        scales, zeros = (), ()
        for g in tl.static_range((D + V_GROUP - 1) // V_GROUP):
            low = tl.full((32,), 65504.0, tl.float32)
            high = -low
            for c in tl.static_range(g * V_GROUP, min((g + 1) * V_GROUP, D), V_BLOCK):
                x = _load(v_row, c, V_BLOCK, HEAD)
                low = tl.minimum(low, tl.reduce(x, 1, tl.standard._elementwise_min))
                high = tl.maximum(high, tl.reduce(x, 1, tl.standard._elementwise_max))
            scale, zero = _parameters(low, high, V_BITS)
            scales, zeros = scales + (scale,), zeros + (zero,)
            tl.store(base16 + V_SCALE + g * 32 + token, scale.to(tl.float16))
            tl.store(base16 + V_ZERO + g * 32 + token, zero.to(tl.float16))
        eight, column = tl.arange(0, 8), tl.arange(0, V_BLOCK)
        for o in tl.static_range(0, v_width, V_BLOCK):
            data = tl.full((32, V_BLOCK), 0, tl.int32)
            for p in tl.static_range(8 // V_BITS):
                x = _load(v_row, p * v_width + o, V_BLOCK, HEAD)
                scale, zero = scales[(p * v_width + o) // V_GROUP], zeros[(p * v_width + o) // V_GROUP]
                data |= _codes(x, scale[:, None], zero[:, None], V_BITS).to(tl.int32) << (p * V_BITS)
            data = tl.reshape(data, (8, 4, V_BLOCK)) << (8 * four)[None, :, None]
            word = tl.reduce(data, 1, tl.standard._sum_combine)
            tl.store(base + V_CODES + eight[:, None] * v_width + o + column[None, :], word)

        tl.store(words_ptr + record, MAGIC)
        tl.store(bytes_ptr + record * 4 + 16 + slab, tl.full((), 1, tl.uint8))

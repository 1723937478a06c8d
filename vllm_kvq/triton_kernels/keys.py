"""Scores of one slab (32 tokens in `mma_order`) for the rows of one KV head.

Queries come as one float16 operand per plane, q_p = q / top * 4^-(b p / 2) = q / top * 2^-(b p), where top is the
row's largest |q|: codes of plane p are 2^(b p) too large where they lie, and |q_p| <= 1 keeps every product with a
float16 scale finite. Scores are returned divided by top * 2^24, which the softmax multiplies back per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import SUBNORMAL, mma_order, plane, row_max, signed_plane

CHANNEL: tl.constexpr = tl.constexpr(0)
HYBRID: tl.constexpr = tl.constexpr(1)
POLAR: tl.constexpr = tl.constexpr(2)
TURN: tl.constexpr = tl.constexpr(0.15915494309189535)  # 1 / (2 pi)


@triton.jit
def key_places(KP: tl.constexpr):
    """The place in its chunk of each of the KP operand rows; chunks shorter than KP are filled with zeros."""
    return mma_order(tl.arange(0, KP))


@triton.jit
def query_channel(
    INDEX: tl.constexpr,
    at,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Channels of query operand INDEX: a chunk of channels, or the x or the y of a chunk of pairs."""
    if KEYS == POLAR:
        chunks: tl.constexpr = D // 2 // CHUNK
        pair = INDEX % chunks * CHUNK + at
        if INTERLEAVED:
            inside = 2 * pair + INDEX // chunks
        else:
            inside = pair + INDEX // chunks * (ROTARY // 2)
        # pairs outside RoPE, as in formats/polar.py
        outside = ROTARY // 2 + pair + INDEX // chunks * ((D - ROTARY) // 2)
        return tl.where(pair < ROTARY // 2, inside, outside)
    else:
        return INDEX * CHUNK + at


@triton.jit
def channel_scores(
    q,
    words_ptr,
    halves_ptr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
):
    """SQuat and KIVI: k = zero_c + scale_c code, so

        s = sum_c (q_c scale_c) code_c + sum_c q_c zero_c

    The scale goes into the query once per slab, the zero into one number per row.
    """
    width: tl.constexpr = D * BITS // 8
    at = key_places(KP)
    quad = tl.arange(0, KP // 4)
    token = mma_order(tl.arange(0, 32))
    place = CODES + quad[:, None] * 32 + token[None, :]
    if width == KP:
        words = tl.load(words_ptr + place)
    else:
        words = tl.load(words_ptr + place, mask=(quad < width // 4)[:, None], other=0)
    # the zeros' sum as a product too; its 8 columns are equal
    bias = tl.full((M, 8), 0.0, tl.float32)
    for p in tl.static_range(8 // BITS - 1, -1, -1):
        zero = tl.load(halves_ptr + ZERO + p * width + at, mask=at < width, other=0.0)
        bias = tl.dot(q[p], tl.broadcast_to(zero[:, None], (KP, 8)), bias * (1 << BITS))
    scores = tl.broadcast_to((row_max(bias) * (1.0 / SUBNORMAL))[:, None], (M, 32))
    for p in tl.static_range(8 // BITS):
        scale = tl.load(halves_ptr + SCALE + p * width + at, mask=at < width, other=0.0)
        scores = tl.dot(q[p] * scale[None, :], plane(words, p, BITS), scores)
    return scores


@triton.jit
def hybrid_scores(
    q,
    words_ptr,
    halves_ptr,
    page_ptr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    SLOT: tl.constexpr,
    NORM: tl.constexpr,
):
    """InnerQ: k = norm_c (zero_tg + scale_tg code) or norm_c scale_tg (code' - 2^b), per token and group, so

        s = sum_g (scale_tg sum_c (q_c norm_c) code_c + offset_tg sum_c (q_c norm_c))

    code' is the code with the sign bit on top; offset is zero, or -2^b scale.
    """
    width: tl.constexpr = D * BITS // 8
    at, quad = key_places(KP), tl.arange(0, KP // 4)
    token = mma_order(tl.arange(0, 32))
    ones = tl.full((KP, 8), 1.0, tl.float16)
    scores = tl.full((M, 32), 0.0, tl.float32)
    for i in tl.static_range(D // CHUNK):
        place = (i * CHUNK % width // 4 + quad[:, None]) * 32 + token[None, :]
        words = tl.load(words_ptr + CODES + place, mask=(quad < CHUNK // 4)[:, None], other=0)
        norm = tl.load(page_ptr + NORM + i * CHUNK + at, mask=at < CHUNK, other=0.0)
        group = i * CHUNK // 32
        mode = tl.load(halves_ptr + SCALE + group * 32 + token).to(tl.float32)
        slot = tl.load(words_ptr + SLOT + group * 32 + token)
        symmetric = mode < 0
        scale = tl.abs(mode)
        offset = tl.where(symmetric, -(1 << BITS) * scale, slot.to(tl.float32, bitcast=True))
        signs = tl.where(symmetric, slot, 0)[None, :] >> (i * CHUNK % 32 // 4 + quad)[:, None]
        folded = q[i] * norm[None, :]
        part = tl.dot(folded, signed_plane(words, signs, i * CHUNK // width, BITS))
        whole = row_max(tl.dot(folded, ones)) * ((1 << (i * CHUNK // width * BITS)) / SUBNORMAL)
        scores += part * scale[None, :] + whole[:, None] * offset[None, :]
    return scores


@triton.jit
def _bytes(words):
    """(Q, X) words -> (4 Q, X) bytes as int32 in `mma_order`."""
    quads: tl.constexpr = words.shape[0]
    columns: tl.constexpr = words.shape[1]
    even = tl.join(words & 255, (words >> 16) & 255)
    odd = tl.join((words >> 8) & 255, (words >> 24) & 255)
    both = tl.reshape(tl.join(even, odd), (quads // 4, 4, columns, 2, 2))
    return tl.reshape(tl.permute(both, (0, 4, 1, 3, 2)), (4 * quads, columns))


@triton.jit
def _circle(turns):
    """(cos, sin) of 2 pi turns, 4e-5 and 6e-6 off: less than a float16 operand keeps.

    Polynomials, least squares on Chebyshev nodes: the precise library functions take many times longer.
    """
    t = turns - tl.floor(turns + 0.5)
    u = t * t
    cos = (((45.620406656567695 * u - 82.3905243665192) * u + 64.67140401563981) * u - 19.730940793506626) * u
    sin = ((32.768526137377265 * u - 74.47078940523645) * u + 81.3654676987811) * u - 41.33112111125566
    return cos + 0.9999590110043385, (sin * u + 6.283054059235825) * t


@triton.jit
def polar_scores(
    q,
    words_ptr,
    page_ptr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    RADIUS: tl.constexpr,
    PAPER: tl.constexpr,
    ANGLE0: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    RADIUS0: tl.constexpr,
    RADIUS_STEP: tl.constexpr,
):
    """PolarQuant, by dequantized dot product:

        s = sum_pairs r (q_x cos phi + q_y sin phi),   phi = phi0 + (a + 1/2) dphi,   r = r0 + (c + 1/2) dr

    or, in the paper's mode, phi = 2 pi a / 2^m and r = c dr.
    """
    pairs: tl.constexpr = D // 2
    chunks: tl.constexpr = pairs // CHUNK
    nibbles: tl.constexpr = BITS + RADIUS_BITS == 8
    at, quad = key_places(KP), tl.arange(0, KP // 4)
    token = mma_order(tl.arange(0, 32))
    scores = tl.full((M, 32), 0.0, tl.float32)
    for i in tl.static_range(chunks):
        place = quad[:, None] * 32 + token[None, :]
        inside = (quad < CHUNK // 4)[:, None]
        if nibbles:
            both = _bytes(tl.load(words_ptr + CODES + i * CHUNK * 8 + place, mask=inside, other=0))
            angle, radius = both & 15, both >> 4
        else:
            # chunks of angles and of radii, each in planes of its own
            a_first = i * CHUNK % (pairs * BITS // 8)
            r_first = i * CHUNK % (pairs * RADIUS_BITS // 8)
            a = _bytes(tl.load(words_ptr + CODES + a_first * 8 + place, mask=inside, other=0))
            r = _bytes(tl.load(words_ptr + RADIUS + r_first * 8 + place, mask=inside, other=0))
            angle = (a >> (i * CHUNK // (pairs * BITS // 8) * BITS)) & ((1 << BITS) - 1)
            radius = (r >> (i * CHUNK // (pairs * RADIUS_BITS // 8) * RADIUS_BITS)) & ((1 << RADIUS_BITS) - 1)
        there = at < CHUNK
        pair = i * CHUNK + at
        step = tl.load(page_ptr + RADIUS_STEP + pair, mask=there, other=0.0).to(tl.float32)
        if PAPER:
            turns = angle.to(tl.float32) * (1.0 / (1 << BITS))
            length = radius.to(tl.float32) * step[:, None]
        else:
            arc = tl.load(page_ptr + ANGLE_STEP + pair, mask=there, other=0.0).to(tl.float32) * TURN
            first = tl.load(page_ptr + ANGLE0 + pair, mask=there, other=0.0).to(tl.float32) * TURN + 0.5 * arc
            shortest = tl.load(page_ptr + RADIUS0 + pair, mask=there, other=0.0).to(tl.float32) + 0.5 * step
            turns = angle.to(tl.float32) * arc[:, None] + first[:, None]
            length = radius.to(tl.float32) * step[:, None] + shortest[:, None]
        cos, sin = _circle(turns)
        scores = tl.dot(q[i], (length * cos).to(tl.float16), scores)
        scores = tl.dot(q[chunks + i], (length * sin).to(tl.float16), scores)
    return scores * (1.0 / SUBNORMAL)

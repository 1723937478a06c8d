# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Scores (32 tokens in `mma_order`, M) of one slab for the M rows of one KV head.

Queries come as one float16 operand per plane, q_p = q / top * 4^-(b p / 2) = q / top * 2^-(b p), where top is the
row's largest |q|: codes of plane p are 2^(b p) too large where they lie, and |q_p| <= 1 keeps every product with a
float16 scale finite. Scores are returned divided by top * 2^24, which the softmax multiplies back per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.lang import (
    ROUND,
    SUBNORMAL,
    column_max,
    columns_of_lanes,
    fragment_channels,
    fragment_places,
    fragment_rows,
    mma_order,
    plane,
    repeat_rows,
    row_sum,
    signed_low,
    signed_pair,
)

CHANNEL: tl.constexpr = tl.constexpr(0)
HYBRID: tl.constexpr = tl.constexpr(1)
POLAR: tl.constexpr = tl.constexpr(2)
TURN: tl.constexpr = tl.constexpr(0.15915494309189535)  # 1 / (2 pi)


@triton.jit
def key_places(KP: tl.constexpr):
    """The place in its chunk of each of the KP operand rows; chunks shorter than KP are filled with zeros."""
    return mma_order(tl.arange(0, KP))


@triton.constexpr_function
def key_shift(channel, d, keys, bits):
    """By how many bits the codes of a channel (not of PolarQuant's) are too large where they lie."""
    return signed_low(channel % 32 // 16, bits) if keys == HYBRID else channel // (d * bits // 8) * bits


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
    place = CODES + quad[None, :] * 32 + token[:, None]
    if width == KP:
        words = tl.load(words_ptr + place)
    else:
        words = tl.load(words_ptr + place, mask=(quad < width // 4)[None, :], other=0)
    # the zeros' sum as a product too; its 16 rows are equal
    bias = tl.full((16, M), 0.0, tl.float32)
    for p in tl.static_range(8 // BITS - 1, -1, -1):
        zero = tl.load(halves_ptr + ZERO + p * width + at, mask=at < width, other=0.0)
        bias = tl.dot(tl.broadcast_to(zero[None, :], (16, KP)), q[p], bias * (1 << BITS))
    scores = tl.broadcast_to((column_max(bias) * (1.0 / SUBNORMAL))[None, :], (32, M))
    for p in tl.static_range(8 // BITS):
        scale = tl.load(halves_ptr + SCALE + p * width + at, mask=at < width, other=0.0)
        scores = tl.dot(plane(words, p, BITS), q[p] * scale[:, None], scores)
    return scores


@triton.jit
def hybrid_scores(
    q,
    words_ptr,
    halves_ptr,
    page_ptr,
    full,
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
    """InnerQ: k = norm_c (zero_tg + scale_tg (code' - 2^b)), per token and group, so

        s = sum_g (scale_tg (sum_c x_c code'_c - 2^b sum_c x_c) + zero_tg sum_c x_c),   x_c = q_c norm_c

    code' is the code with a sign bit on top: its own if the group is symmetric, whose zero is 0, else always 1. So both
    modes are one product, which starts at -2^b sum_c x_c.
    """
    width: tl.constexpr = D * BITS // 8
    half: tl.constexpr = 16 // CHUNK
    own, quad = fragment_places(4), tl.arange(0, 4)[None, :, None]
    channel = fragment_channels(M)
    scores = tl.full((32, M), 0.0, tl.float32)
    for group in tl.static_range(D // 32):
        mode = tl.load(halves_ptr + SCALE + group * 32 + own).to(tl.float32)
        slot = tl.load(words_ptr + SLOT + group * 32 + own)
        symmetric = mode < 0
        zero = tl.where(symmetric, 0.0, slot.to(tl.float32, bitcast=True))
        signs = tl.where(symmetric, slot, -1)
        words, folded = (), ()
        whole = tl.full((16, M), 0.0, tl.float32)
        for i in tl.static_range(group * 2 * half, (group + 1) * 2 * half):
            place = words_ptr + CODES + i * CHUNK % width * 8 + quad * 32 + own
            norm_place = page_ptr + NORM + i * CHUNK + channel
            if CHUNK == 16:
                words = words + (tl.load(place),)
                norm = tl.load(norm_place)
            else:
                words = words + (tl.load(place, mask=quad < CHUNK // 4, other=0),)
                norm = tl.load(norm_place, mask=channel < CHUNK, other=0.0)
            folded = folded + (columns_of_lanes(q[i] * norm),)
            # -2^b, as much too large as the codes are
            top = tl.full((16, KP), -(1 << BITS << key_shift(i * CHUNK, D, HYBRID, BITS)) / SUBNORMAL, tl.float16)
            whole = tl.dot(top, folded[i % (2 * half)], whole)  # equal rows
        zeros = repeat_rows(whole * (-1.0 / (1 << BITS)), 2)
        part = repeat_rows(whole, 2)
        for c in tl.static_range(half):
            i = group * 2 * half + c
            first, second = signed_pair(
                words[c], words[c + half], signs, full,
                i * CHUNK // width, (i + half) * CHUNK // width, c * CHUNK // 4, BITS
            )  # fmt: skip
            part = tl.dot(second, folded[c + half], tl.dot(first, folded[c], part))
        scores += part * fragment_rows(tl.abs(mode), M)
        scores += zeros * fragment_rows(zero, M)
    # from the fragment's order to `mma_order`: token bits (g2 g1 g0 r1 r0) at place bits (g2 r0 g1 g0 r1)
    scores = tl.reshape(scores, (2, 2, 2, 4, M))
    return tl.reshape(tl.permute(scores, (2, 1, 3, 0, 4)), (32, M))


@triton.jit
def _four(b0, b1, b2, b3):
    """What belongs to the four bytes of (X, Q) words -> (X, 4 Q) in `mma_order`."""
    rows: tl.constexpr = b0.shape[0]
    quads: tl.constexpr = b0.shape[1]
    both = tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), (rows, quads // 4, 4, 2, 2))
    return tl.reshape(tl.permute(both, (0, 1, 4, 2, 3)), (rows, 4 * quads))


@triton.jit
def _code(words, B: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr):
    return (words >> (8 * B + SHIFT)) & ((1 << BITS) - 1)


@triton.jit
def codes(words, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The codes at bits [SHIFT, SHIFT + BITS) of every byte, as int32."""
    return _four(
        _code(words, 0, SHIFT, BITS), _code(words, 1, SHIFT, BITS),
        _code(words, 2, SHIFT, BITS), _code(words, 3, SHIFT, BITS),
    )  # fmt: skip


@triton.jit
def _mantissa(words, B: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr):
    at: tl.constexpr = 8 * B + SHIFT
    top: tl.constexpr = 23 - BITS
    moved = words << (top - at) if top >= at else words >> (at - top)
    return ((moved & (((1 << BITS) - 1) << top)) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def mantissas(words, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """1 + code / 2^BITS as float32: the code is moved to the top of a mantissa, which saves its conversion."""
    return _four(
        _mantissa(words, 0, SHIFT, BITS), _mantissa(words, 1, SHIFT, BITS),
        _mantissa(words, 2, SHIFT, BITS), _mantissa(words, 3, SHIFT, BITS),
    )  # fmt: skip


@triton.jit
def _circle(turns):
    """(cos, sin) of 2 pi turns, 4e-5 and 6e-6 off: less than a float16 operand keeps.

    Polynomials, least squares on Chebyshev nodes: the precise library functions take many times longer.
    """
    t = turns - ((turns + ROUND) - ROUND)
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
    TABLE: tl.constexpr,
    ANGLE0: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    RADIUS0: tl.constexpr,
    RADIUS_STEP: tl.constexpr,
):
    """PolarQuant:

        s = sum_pairs r (q_x cos phi + q_y sin phi),   phi = phi0 + (a + 1/2) dphi,   r = r0 + (c + 1/2) dr

    or, in the paper's mode, phi = 2 pi a / 2^m and r = c dr. Either the keys are rebuilt and multiplied with all rows
    at once, or (TABLE > 0, as in the paper) the first TABLE rows, of which no other is real, look up

        s = sum_pairs r t[a],   t[a] = q_x cos phi_a + q_y sin phi_a
    """
    pairs: tl.constexpr = D // 2
    chunks: tl.constexpr = pairs // CHUNK
    nibbles: tl.constexpr = BITS + RADIUS_BITS == 8
    at, quad = key_places(KP), tl.arange(0, KP // 4)
    token = mma_order(tl.arange(0, 32))
    row = tl.arange(0, M)
    scores = tl.full((32, M), 0.0, tl.float32)
    for i in tl.static_range(chunks):
        place = quad[None, :] * 32 + token[:, None]
        inside = (quad < CHUNK // 4)[None, :]
        if nibbles:
            a_words = tl.load(words_ptr + CODES + i * CHUNK * 8 + place, mask=inside, other=0)
            r_words, a_shift, r_shift = a_words, 0, 4
        else:
            # chunks of angles and of radii, each in planes of its own
            a_first = i * CHUNK % (pairs * BITS // 8)
            r_first = i * CHUNK % (pairs * RADIUS_BITS // 8)
            a_words = tl.load(words_ptr + CODES + a_first * 8 + place, mask=inside, other=0)
            r_words = tl.load(words_ptr + RADIUS + r_first * 8 + place, mask=inside, other=0)
            a_shift = i * CHUNK // (pairs * BITS // 8) * BITS
            r_shift = i * CHUNK // (pairs * RADIUS_BITS // 8) * RADIUS_BITS
        there = at < CHUNK
        pair = i * CHUNK + at
        # radius and angle from 1 + code / 2^bits: r = wide x + base
        wide = tl.load(page_ptr + RADIUS_STEP + pair, mask=there, other=0.0).to(tl.float32) * (1 << RADIUS_BITS)
        base = -wide
        turn = tl.full((KP,), 1.0, tl.float32)
        begin = -turn
        if not PAPER:
            turn = tl.load(page_ptr + ANGLE_STEP + pair, mask=there, other=0.0).to(tl.float32) * (TURN * (1 << BITS))
            begin = tl.load(page_ptr + ANGLE0 + pair, mask=there, other=0.0).to(tl.float32) * TURN
            begin += turn * (0.5 / (1 << BITS) - 1.0)
            base = tl.load(page_ptr + RADIUS0 + pair, mask=there, other=0.0).to(tl.float32)
            base += wide * (0.5 / (1 << RADIUS_BITS) - 1.0)
        length = mantissas(r_words, r_shift, RADIUS_BITS) * wide[None, :] + base[None, :]
        if TABLE == 0:
            cos, sin = _circle(mantissas(a_words, a_shift, BITS) * turn[None, :] + begin[None, :])
            scores = tl.dot((length * cos).to(tl.float16), q[i], scores)
            scores = tl.dot((length * sin).to(tl.float16), q[chunks + i], scores)
        else:
            angle = codes(a_words, a_shift, BITS)
            grid = 1.0 + tl.arange(0, 1 << BITS).to(tl.float32) * (1.0 / (1 << BITS))
            cos, sin = _circle(grid[:, None] * turn[None, :] + begin[None, :])
            for m in tl.static_range(TABLE):
                mine = (row == m)[None, :]
                q_x = row_sum(tl.where(mine, q[i].to(tl.float32), 0.0))
                q_y = row_sum(tl.where(mine, q[chunks + i].to(tl.float32), 0.0))
                looked = tl.gather(cos * q_x[None, :] + sin * q_y[None, :], angle, 0)
                scores += tl.where(mine, row_sum(looked * length)[:, None], 0.0)
    return scores * (1.0 / SUBNORMAL)

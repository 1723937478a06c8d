# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""PolarQuant's scores of one slab, as in keys.py:

    s = sum_pairs r (q_x cos phi + q_y sin phi),   phi = phi0 + (a + 1/2) dphi,   r = r0 + (c + 1/2) dr

or, in the paper's mode, phi = 2 pi a / 2^m and r = c dr. Either keys are rebuilt and multiplied with all rows at once
(`polar_scores`), or every row looks its angles up, as in the paper (`polar_lookup`).

To rebuild a key takes no sine: of a code a = 8 h + m, the eight angles of h = 0 turned by 4 dphi are computed once per
page, one in each of the lanes that share a pair, which look m up there (a shuffle). With T_m = e^(i (phi0 + (m + 4 +
1/2) dphi)) and s_h = -1 or 1 for h = 0 or 1,

    r e^(i phi) = r T_m e^(i s_h 4 dphi) = cos(4 dphi) r T_m + sin(4 dphi) i (s_h r) T_m

and the factors that depend on the pair alone go into two queries. Of two bits per angle the four are computed, and one
query serves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import (
    columns_of_lanes,
    fragment_channels,
    fragment_index,
    fragment_places,
    lane_quads,
    lane_rows,
    mma_order,
    moved,
    operand_of_words,
)
from vllm_kvq.triton_kernels.lang import (
    SUBNORMAL,
    cos_sin,
    fused_halves,
    halves_times,
    product,
    rounded_halves,
    row_sum,
    two_halves,
)

CIRCLE: tl.constexpr = tl.constexpr(6.283185307179586)


@triton.jit
def _by_byte(x):
    """(32, 4) -> four (32, 1)."""
    even, odd = tl.split(tl.reshape(x, (32, 2, 2)))
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    return b0[:, None], b1[:, None], b2[:, None], b3[:, None]


@triton.constexpr_function
def plane_pairs(pairs, bits, both):
    """Pairs whose codes stand at one bit of the bytes: all, where angle and radius share a byte."""
    return pairs if both == 8 else pairs * bits // 8


@triton.constexpr_function
def first_bit(pair, pairs, bits, both):
    """The bit of the bytes at which the codes of this pair's plane begin."""
    return pair // plane_pairs(pairs, bits, both) * bits


@triton.jit
def _plane_words(
    codes_ptr, quad, token, INDEX: tl.constexpr, CHUNK: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr
):
    """The words of a chunk of pairs. Of planes shorter than a chunk, later ones are moved to the first one's bits."""
    width: tl.constexpr = PLANE // 4
    if PLANE < CHUNK:
        words = tl.load(codes_ptr + quad % width * 32 + token, mask=quad < CHUNK // 4, other=0)
        return words >> (quad // width * BITS)
    else:
        first: tl.constexpr = INDEX * CHUNK % PLANE // 4
        return tl.load(codes_ptr + (first + quad) * 32 + token, mask=quad < CHUNK // 4, other=0)


@triton.jit
def _words(
    words_ptr,
    quad,
    token,
    INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    BITS: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    CODES: tl.constexpr,
    RADIUS: tl.constexpr,
):
    """The words of a chunk's angles and of its radii: the same, if they share bytes."""
    both: tl.constexpr = BITS + RADIUS_BITS
    a_plane: tl.constexpr = plane_pairs(PAIRS, BITS, both)
    r_plane: tl.constexpr = plane_pairs(PAIRS, RADIUS_BITS, both)
    angles = _plane_words(words_ptr + CODES, quad, token, INDEX, CHUNK, a_plane, BITS)
    if both == 8:
        return angles, angles
    else:
        return angles, _plane_words(words_ptr + RADIUS, quad, token, INDEX, CHUNK, r_plane, RADIUS_BITS)


@triton.jit
def _parameters(
    page_ptr,
    INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    PAPER: tl.constexpr,
    ANGLE0: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    RADIUS0: tl.constexpr,
    RADIUS_STEP: tl.constexpr,
):
    """r0, dr, phi0 and dphi of a chunk of pairs, by the byte that they belong to; zeros beyond the chunk."""
    channel = fragment_channels(8)
    pair, there = page_ptr + INDEX * CHUNK + channel, channel < CHUNK
    r_step = tl.load(pair + RADIUS_STEP, mask=there, other=0.0)
    if PAPER:
        a_step = tl.full((32, 4), CIRCLE / (1 << BITS), tl.float32)
        r_first, a_first = (r_step.to(tl.float32) * -0.5).to(tl.float16), a_step * -0.5
    else:
        r_first = tl.load(pair + RADIUS0, mask=there, other=0.0)
        a_step = tl.load(pair + ANGLE_STEP, mask=there, other=0.0).to(tl.float32)
        a_first = tl.load(pair + ANGLE0, mask=there, other=0.0).to(tl.float32)
    return _by_byte(r_first), _by_byte(r_step), _by_byte(a_first), _by_byte(a_step)


@triton.constexpr_function
def before_first(bits):
    """1/2 - 2^bits, as two float16 in one word."""
    half = 0x8000 | (14 + bits) << 10 | (1024 - (1024 >> bits))
    return half * 0x00010001 - (1 << 32)


@triton.jit
def _radii(words, step, first, full, EVEN: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr):
    """r of two bytes of each word as two float16: 0 and 2, or 1 and 3. A code in the upper bits of a float16's mantissa
    is 2^BITS + code: no conversion. `full` is -1, which the compiler does not know: an instruction takes one constant.
    """
    place: tl.constexpr = 10 - BITS
    mask: tl.constexpr = (((1 << BITS) - 1) << place) * 0x00010001
    power: tl.constexpr = ((15 + BITS) << 10) * 0x00010001
    codes = moved(words, place - AT if EVEN else place - AT - 8) & (full & mask)
    return fused_halves(codes | power, step, first)


@triton.jit
def _grid(first, step, BITS: tl.constexpr):
    """(step, first) of `_radii`, of bytes 0 and 2 and of bytes 1 and 3: step (2^BITS + code) + first is
    r0 + (code + 1/2) dr."""
    even, odd = two_halves(step[0], step[2]), two_halves(step[1], step[3])
    before = tl.full((32, 1), before_first(BITS), tl.int32)
    even_first = fused_halves(even, before, two_halves(first[0], first[2]))
    return (even, even_first), (odd, fused_halves(odd, before, two_halves(first[1], first[3])))


@triton.jit
def _circle(first, step, BITS: tl.constexpr):
    """cos and sin, two float16, of T_m: (32,) of which lane 4 g + t holds m = g for its pair."""
    middle: tl.constexpr = 4.5 if BITS == 4 else 0.5
    cos, sin = cos_sin(first + (lane_rows().to(tl.float32) + middle) * step)
    return tl.reshape(rounded_halves(cos, sin), (32,))


@triton.jit
def _turned(
    q,
    page_ptr,
    INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    PAPER: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
):
    """Query operands of a chunk of pairs: q cos(4 dphi), and q turned by a right angle, times sin(4 dphi). Of each two,
    one for bytes 0 and 1, one for bytes 2 and 3."""
    m: tl.constexpr = q[0].shape[0] // 4
    channel = fragment_channels(m)
    if PAPER:
        step = tl.full((4 * m, 4), CIRCLE / (1 << BITS), tl.float32)
    else:
        place = page_ptr + INDEX * CHUNK + channel + ANGLE_STEP
        step = tl.load(place, mask=channel < CHUNK, other=0.0).to(tl.float32)
    cos, sin = cos_sin(step * 4.0)
    cos = tl.split(tl.permute(tl.reshape(cos.to(tl.float16), (4 * m, 2, 2)), (0, 2, 1)))
    sin = tl.split(tl.permute(tl.reshape(sin.to(tl.float16), (4 * m, 2, 2)), (0, 2, 1)))
    straight, across = (), ()
    for half in tl.static_range(2):
        x, y = tl.split(tl.permute(tl.reshape(q[half], (4 * m, 2, 2)), (0, 2, 1)))
        both = tl.join(product(x, cos[half]), product(y, cos[half]))
        turned = tl.join(product(y, -sin[half]), product(x, sin[half]))
        straight = straight + (columns_of_lanes(tl.reshape(tl.permute(both, (0, 2, 1)), (4 * m, 4))),)
        across = across + (columns_of_lanes(tl.reshape(tl.permute(turned, (0, 2, 1)), (4 * m, 4))),)
    return straight, across


@triton.jit
def _chunk_scores(
    straight,
    across,
    sums,
    words_ptr,
    circles,
    grid,
    full,
    D: tl.constexpr,
    BITS: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    RADIUS: tl.constexpr,
):
    """What a chunk of pairs adds to the scores of a slab.

    `circles` are T_m by byte, `grid` is `_grid`'s, `straight` and `across` are `_turned`'s.
    """
    both: tl.constexpr = BITS + RADIUS_BITS
    a_at: tl.constexpr = first_bit(INDEX * CHUNK, D // 2, BITS, both)
    r_at: tl.constexpr = 4 if both == 8 else first_bit(INDEX * CHUNK, D // 2, RADIUS_BITS, both)
    a_words, r_words = _words(
        words_ptr, lane_quads(), fragment_places(4), INDEX, CHUNK, D // 2, BITS, RADIUS_BITS, CODES, RADIUS
    )
    looked_up: tl.constexpr = 0x1C1C1C1C if BITS == 4 else 0x0C0C0C0C
    lanes = (moved(a_words, 2 - a_at) & looked_up) | (lane_quads() * 0x01010101)
    even, odd = grid
    r = (
        _radii(r_words, even[0], even[1], full, True, r_at, RADIUS_BITS),
        _radii(r_words, odd[0], odd[1], full, False, r_at, RADIUS_BITS),
    )
    key, other = (), ()
    for b in tl.static_range(4):
        lane = (lanes >> (8 * b)) & 31
        unit = tl.reshape(tl.gather(circles[b], tl.reshape(lane, (128,)), 0), (32, 4))
        key = key + (halves_times(unit, r[b % 2], b >= 2),)
        if BITS == 4:
            h = moved(a_words, (12 if b % 2 == 0 else 4) - a_at) & -0x7FFF8000
            other = other + (halves_times(unit, r[b % 2] ^ h, b >= 2),)
    for half in tl.static_range(2):
        sums = tl.dot(operand_of_words(key[2 * half], key[2 * half + 1]), straight[half], sums)
        if BITS == 4:
            sums = tl.dot(operand_of_words(other[2 * half], other[2 * half + 1]), across[half], sums)
    return sums


@triton.jit
def polar_scores(
    q,
    words_ptr,
    page_ptr,
    full,
    D: tl.constexpr,
    SLABS: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    RADIUS: tl.constexpr,
    PAPER: tl.constexpr,
    ANGLE0: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    RADIUS0: tl.constexpr,
    RADIUS_STEP: tl.constexpr,
):
    """With keys rebuilt, for SLABS slabs that follow each other. `full` is -1, which the compiler does not know."""
    tl.static_assert(BITS == 2 or BITS == 4)
    chunks: tl.constexpr = D // 2 // CHUNK
    sums = ()
    for _ in tl.static_range(SLABS):
        sums = sums + (tl.full((32, M), 0.0, tl.float32),)
    for i in tl.static_range(chunks):
        r_first, r_step, a_first, a_step = _parameters(
            page_ptr, i, CHUNK, BITS, PAPER, ANGLE0, ANGLE_STEP, RADIUS0, RADIUS_STEP
        )
        grid = _grid(r_first, r_step, RADIUS_BITS)
        circles = ()
        for b in tl.static_range(4):
            circles = circles + (_circle(a_first[b], a_step[b], BITS),)
        if BITS == 4:
            straight, across = _turned((q[2 * i], q[2 * i + 1]), page_ptr, i, CHUNK, BITS, PAPER, ANGLE_STEP)
        else:
            straight = columns_of_lanes(q[2 * i]), columns_of_lanes(q[2 * i + 1])
            across = straight
        added = ()
        for j in tl.static_range(SLABS):
            part = _chunk_scores(
                straight, across, sums[j], words_ptr + j * SLAB_WORDS, circles, grid, full,
                D, BITS, RADIUS_BITS, i, CHUNK, CODES, RADIUS,
            )  # fmt: skip
            added = added + (part,)
        sums = added
    scores = ()
    for j in tl.static_range(SLABS):
        scores = scores + (sums[j] * (1.0 / SUBNORMAL),)
    return scores


@triton.jit
def _code(words, B: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr):
    return (words >> (8 * B + AT)) & ((1 << BITS) - 1)


@triton.jit
def _codes(words, AT: tl.constexpr, BITS: tl.constexpr):
    """The codes at bits [AT, AT + BITS) of every byte of (X, Q) words -> int32 (X, 4 Q) in `mma_order`."""
    rows: tl.constexpr = words.shape[0]
    quads: tl.constexpr = words.shape[1]
    even = tl.join(_code(words, 0, AT, BITS), _code(words, 2, AT, BITS))
    both = tl.join(even, tl.join(_code(words, 1, AT, BITS), _code(words, 3, AT, BITS)))
    both = tl.reshape(both, (rows, quads // 4, 4, 2, 2))
    return tl.reshape(tl.permute(both, (0, 1, 4, 2, 3)), (rows, 4 * quads))


@triton.jit
def _table(
    words_ptr,
    page_ptr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    RADIUS: tl.constexpr,
    PAPER: tl.constexpr,
    ANGLE0: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    RADIUS0: tl.constexpr,
    RADIUS_STEP: tl.constexpr,
):
    """Radii and angle codes (32, 16) of a chunk of pairs, and cos, sin (2^BITS, 16) of their angles."""
    both: tl.constexpr = BITS + RADIUS_BITS
    a_at: tl.constexpr = first_bit(INDEX * CHUNK, D // 2, BITS, both)
    r_at: tl.constexpr = 4 if both == 8 else first_bit(INDEX * CHUNK, D // 2, RADIUS_BITS, both)
    quad, token = tl.arange(0, 4)[None, :], fragment_index(tl.arange(0, 32), 4)[:, None]
    a_words, r_words = _words(words_ptr, quad, token, INDEX, CHUNK, D // 2, BITS, RADIUS_BITS, CODES, RADIUS)
    at = mma_order(tl.arange(0, 16))
    pair, there = page_ptr + INDEX * CHUNK + at, at < CHUNK
    r_step = tl.load(pair + RADIUS_STEP, mask=there, other=0.0).to(tl.float32)
    if PAPER:
        a_step = tl.full((16,), CIRCLE / (1 << BITS), tl.float32)
        r_base, a_base = r_step * 0.0, a_step * 0.0
    else:
        a_step = tl.load(pair + ANGLE_STEP, mask=there, other=0.0).to(tl.float32)
        r_base = tl.load(pair + RADIUS0, mask=there, other=0.0).to(tl.float32) + 0.5 * r_step
        a_base = tl.load(pair + ANGLE0, mask=there, other=0.0).to(tl.float32) + 0.5 * a_step
    length = _codes(r_words, r_at, RADIUS_BITS).to(tl.float32) * r_step[None, :] + r_base[None, :]
    cell = tl.arange(0, 1 << BITS).to(tl.float32)
    cos, sin = cos_sin(cell[:, None] * a_step[None, :] + a_base[None, :])
    return length, _codes(a_words, a_at, BITS), cos, sin


@triton.jit
def polar_lookup(
    q,
    words_ptr,
    page_ptr,
    TABLE: tl.constexpr,
    D: tl.constexpr,
    SLABS: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    RADIUS_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    M: tl.constexpr,
    CODES: tl.constexpr,
    RADIUS: tl.constexpr,
    PAPER: tl.constexpr,
    ANGLE0: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    RADIUS0: tl.constexpr,
    RADIUS_STEP: tl.constexpr,
):
    """The first TABLE rows, of which no other is real, look up

    s = sum_pairs r t[a],   t[a] = q_x cos phi_a + q_y sin phi_a
    """
    chunks: tl.constexpr = D // 2 // CHUNK
    row = tl.arange(0, M)
    scores = ()
    for j in tl.static_range(SLABS):
        sums = tl.full((32, M), 0.0, tl.float32)
        for i in tl.static_range(chunks):
            length, angle, cos, sin = _table(
                words_ptr + j * SLAB_WORDS, page_ptr, D, BITS, RADIUS_BITS, i, CHUNK, CODES, RADIUS, PAPER,
                ANGLE0, ANGLE_STEP, RADIUS0, RADIUS_STEP,
            )  # fmt: skip
            for m in tl.static_range(TABLE):
                mine = (row == m)[None, :]
                q_x = row_sum(tl.where(mine, q[i].to(tl.float32), 0.0))
                q_y = row_sum(tl.where(mine, q[chunks + i].to(tl.float32), 0.0))
                looked = tl.gather(cos * q_x[None, :] + sin * q_y[None, :], angle, 0)
                sums += tl.where(mine, row_sum(looked * length)[:, None], 0.0)
        scores = scores + (sums * (1.0 / SUBNORMAL),)
    return scores

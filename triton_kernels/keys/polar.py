# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""PolarQuant's scores of one slab, as in channel.py:

    s = sum_pairs r (q_x cos phi + q_y sin phi),   phi = phi0 + (a + 1/2) dphi,   r = r0 + (c + 1/2) dr

or, in the paper's mode, phi = 2 pi a / 2^m and r = c dr. Keys are rebuilt and multiplied by all rows at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import (
    fragment_channels,
    fragment_places,
    lane_quads,
    left_operand,
)
from vllm_kvq.triton_kernels.lang import SUBNORMAL, cos_sin

CIRCLE: tl.constexpr = tl.constexpr(6.283185307179586)


@triton.constexpr_function
def mantissa_place(at, bits):
    """The bit of a float32's mantissa for a code at bit `at` of a word: the same, 11 bits up or 9 bits down.

    So two shifts serve the eight nibbles of a word. At bit 11 or higher, 1.0 adds at most 2^12 steps, and
    subtracting it again leaves errors of 2^-13 steps.
    """
    return at if 11 <= at <= 23 - bits else at + 11 if at < 11 else at - 9


@triton.jit
def _mantissa(words, one, AT: tl.constexpr, BITS: tl.constexpr):
    """1 + code 2^(place - 23) for the code at bit AT: no conversion. `one` has the bits of 1.0, hidden from the
    compiler, because an instruction takes only one constant."""
    place: tl.constexpr = mantissa_place(AT, BITS)
    moved = words << (place - AT) if place >= AT else words >> (AT - place)
    return ((moved & (((1 << BITS) - 1) << place)) | one).to(tl.float32, bitcast=True)


@triton.jit
def _grid(step, first, AT: tl.constexpr, BITS: tl.constexpr):
    """(wide, base) with wide * _mantissa + base = first + (code + 1/2) step."""
    ones: tl.constexpr = 1 << (23 - mantissa_place(AT, BITS))
    return step * ones, step * (0.5 - ones) + first


@triton.jit
def _by_byte(x):
    """(32, 4) -> four (32, 1)."""
    even, odd = tl.split(tl.reshape(x, (32, 2, 2)))
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    return b0[:, None], b1[:, None], b2[:, None], b3[:, None]


@triton.constexpr_function
def plane_pairs(pairs, bits, both):
    """The number of pairs with codes at the same bit of the bytes: all, if angle and radius share a byte."""
    return pairs if both == 8 else pairs * bits // 8


@triton.constexpr_function
def first_bit(pair, pairs, bits, both):
    """The bit of the bytes at which the codes of this pair's plane start."""
    return pair // plane_pairs(pairs, bits, both) * bits


@triton.jit
def _plane_words(
    codes_ptr, quad, token, INDEX: tl.constexpr, CHUNK: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr
):
    """The words of a chunk of pairs. If planes are shorter than a chunk, later ones move to the first one's bits."""
    width: tl.constexpr = PLANE // 4
    if PLANE < CHUNK:
        words = tl.load(codes_ptr + quad % width * 32 + token, mask=quad < CHUNK // 4, other=0)
        return words >> (quad // width * BITS)
    else:
        first: tl.constexpr = INDEX * CHUNK % PLANE // 4
        return tl.load(codes_ptr + (first + quad) * 32 + token, mask=quad < CHUNK // 4, other=0)


@triton.jit
def _words(words_ptr, quad, token, K: tl.constexpr, INDEX: tl.constexpr, PAIRS: tl.constexpr):
    """The words of a chunk's angles and of its radii: the same, if they share bytes."""
    both: tl.constexpr = K.bits + K.radius_bits
    a_plane: tl.constexpr = plane_pairs(PAIRS, K.bits, both)
    r_plane: tl.constexpr = plane_pairs(PAIRS, K.radius_bits, both)
    angles = _plane_words(words_ptr + K.codes, quad, token, INDEX, K.chunk, a_plane, K.bits)
    if both == 8:
        return angles, angles
    else:
        return angles, _plane_words(words_ptr + K.radius, quad, token, INDEX, K.chunk, r_plane, K.radius_bits)


@triton.jit
def _parameters(page_ptr, K: tl.constexpr, INDEX: tl.constexpr):
    """r0, dr, phi0 and dphi of a chunk of pairs, by the byte to which they belong; zeros beyond the chunk."""
    channel = fragment_channels(8)
    pair, there = page_ptr + INDEX * K.chunk + channel, channel < K.chunk
    r_step = tl.load(pair + K.radius_step, mask=there, other=0.0).to(tl.float32)
    if K.paper:
        a_step = tl.full((32, 4), CIRCLE / (1 << K.bits), tl.float32)
        r_first, a_first = r_step * -0.5, a_step * -0.5
    else:
        r_first = tl.load(pair + K.radius0, mask=there, other=0.0).to(tl.float32)
        a_step = tl.load(pair + K.angle_step, mask=there, other=0.0).to(tl.float32)
        a_first = tl.load(pair + K.angle0, mask=there, other=0.0).to(tl.float32)
    return _by_byte(r_first), _by_byte(r_step), _by_byte(a_first), _by_byte(a_step)


@triton.jit
def _rebuilt(words_ptr, parameters, one, R: tl.constexpr, K: tl.constexpr, INDEX: tl.constexpr):
    """The x and the y of a chunk of pairs, each a left operand (32, 16), made in the lanes that multiply them."""
    both: tl.constexpr = K.bits + K.radius_bits
    a_at: tl.constexpr = first_bit(INDEX * K.chunk, R.d // 2, K.bits, both)
    r_at: tl.constexpr = 4 if both == 8 else first_bit(INDEX * K.chunk, R.d // 2, K.radius_bits, both)
    quad, token = lane_quads(), fragment_places(4)
    a_words, r_words = _words(words_ptr, quad, token, K, INDEX, R.d // 2)
    r_first, r_step, a_first, a_step = parameters
    x, y = (), ()
    for b in tl.static_range(4):
        wide, base = _grid(r_step[b], r_first[b], 8 * b + r_at, K.radius_bits)
        r = _mantissa(r_words, one, 8 * b + r_at, K.radius_bits) * wide + base
        wide, base = _grid(a_step[b], a_first[b], 8 * b + a_at, K.bits)
        cos, sin = cos_sin(_mantissa(a_words, one, 8 * b + a_at, K.bits) * wide + base)
        x, y = x + ((r * cos).to(tl.float16),), y + ((r * sin).to(tl.float16),)
    return left_operand(x[0], x[1], x[2], x[3]), left_operand(y[0], y[1], y[2], y[3])


@triton.jit
def polar_scores(q, words_ptr, page_ptr, full, R: tl.constexpr, K: tl.constexpr, SLABS: tl.constexpr, M: tl.constexpr):
    """With keys rebuilt, for SLABS consecutive slabs. `full` is -1, which the compiler does not know."""
    chunks: tl.constexpr = R.d // 2 // K.chunk
    one = full & 0x3F800000
    sums = ()
    for _ in tl.static_range(SLABS):
        sums = sums + (tl.full((32, M), 0.0, tl.float32),)
    for i in tl.static_range(chunks):
        parameters = _parameters(page_ptr, K, i)
        added = ()
        for j in tl.static_range(SLABS):
            x, y = _rebuilt(words_ptr + j * R.slab_words, parameters, one, R, K, i)
            added = added + (tl.dot(y, q[chunks + i], tl.dot(x, q[i], sums[j])),)
        sums = added
    scores = ()
    for j in tl.static_range(SLABS):
        scores = scores + (sums[j] * (1.0 / SUBNORMAL),)
    return scores

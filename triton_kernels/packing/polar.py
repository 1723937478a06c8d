# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Packs the keys of one page as PolarQuant: radius and angle of channel pairs, see formats/methods/polar.py.

    grouped   phi = phi0 + (a + 1/2) dphi,  r = r0 + (c + 1/2) dr;  phi0 is the first angle after the widest gap
    paper     phi = 2 pi a / 2^m,           r = c s

The widest gap needs the page's angles in order: a bitonic sort of the tokens, all pairs of a chunk side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.keys.channel import query_channel
from vllm_kvq.triton_kernels.lang import ROUND, clean, lost
from vllm_kvq.triton_kernels.packing.values import levels, load_channels, positive_half

PI: tl.constexpr = tl.constexpr(3.141592653589793)
FULL: tl.constexpr = tl.constexpr(6.283185307179586)


@triton.jit
def arctangent(y, x):
    """atan2 with errors of a few 1e-7: Cephes' polynomial after one reduction to |t| <= tan(pi / 8)."""
    ax, ay = tl.abs(x), tl.abs(y)
    large, small = tl.maximum(ax, ay), tl.minimum(ax, ay)
    steep = small > 0.41421356 * large
    top = tl.where(steep, small - large, small)
    bottom = tl.where(steep, small + large, large)
    t = tl.div_rn(top, tl.where(bottom > 0, bottom, 1.0))
    u = t * t
    p = ((8.05374449538e-2 * u - 1.38776856032e-1) * u + 1.99777106478e-1) * u - 3.33329491539e-1
    angle = tl.where(steep, PI / 4, 0.0) + (p * u * t + t)
    angle = tl.where(ay > ax, PI / 2 - angle, angle)
    angle = tl.where(x < 0, PI - angle, angle)
    return tl.where(y < 0, -angle, angle)


@triton.jit
def ascending(x):
    """(T, C) sorted along dimension 0; T is a power of two."""
    size: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    i = tl.broadcast_to(tl.arange(0, size)[:, None], (size, columns))
    for a in tl.static_range(1, 11):
        if (1 << a) <= size:
            for b in tl.static_range(a):
                other = tl.gather(x, i ^ (1 << (a - 1 - b)), 0)
                lower = (i & (1 << (a - 1 - b))) == 0
                up = (i & (1 << a)) == 0
                x = tl.where(lower == up, tl.minimum(x, other), tl.maximum(x, other))
    return x


@triton.jit
def widest_gap(phi, real, UNIT: tl.constexpr):
    """(first angle after the widest gap between neighbours on the circle, that gap), each (C,)."""
    size: tl.constexpr = phi.shape[0]
    columns: tl.constexpr = phi.shape[1]
    i = tl.broadcast_to(tl.arange(0, size)[:, None], (size, columns))
    s = ascending(tl.where(real[:, None], phi, 1.0e30))
    before = tl.gather(s, tl.where(i == 0, UNIT - 1, i - 1), 0)
    gap = tl.where(i == 0, s + FULL, s) - before
    gap = tl.where(i < UNIT, gap, -1.0)
    widest = tl.reduce(gap, 0, tl.standard._elementwise_max)
    first = tl.reduce(tl.where(gap == widest[None, :], s, 1.0e30), 0, tl.standard._elementwise_min)
    return first, widest


@triton.jit
def _chunk(tokens, page16, R: tl.constexpr, K: tl.constexpr, INDEX: tl.constexpr):
    """(angle codes, radius codes, replaced elements) of chunk INDEX of pairs; its parameters go to the page."""
    chunks: tl.constexpr = R.d // 2 // K.block
    at = tl.arange(0, K.block)
    real = tokens[1] | tokens[3]
    cx = query_channel(at, R, K, INDEX, K.block)
    cy = query_channel(at, R, K, INDEX + chunks, K.block)
    x, y = load_channels(tokens, cx, R.head), load_channels(tokens, cy, R.head)
    damage = lost(x) + lost(y)
    x, y = clean(x), clean(y)
    phi, r = arctangent(y, x), tl.sqrt_rn(x * x + y * y)
    longest = tl.reduce(tl.where(real[:, None], r, 0.0), 0, tl.standard._elementwise_max)
    pair = INDEX * K.block + at
    if K.paper:
        step = positive_half(levels(longest, K.radius_bits))
        tl.store(page16 + K.radius_step + pair, step.to(tl.float16))
        cell = tl.full(phi.shape, FULL / (1 << K.bits), tl.float32)
        a = ((tl.div_rn(phi, cell) + ROUND) - ROUND).to(tl.int32) & ((1 << K.bits) - 1)
        r, step = tl.broadcast(r, step[None, :])
        c = (tl.minimum(tl.div_rn(r, step), (1 << K.radius_bits) - 1) + ROUND) - ROUND
    else:
        shortest = tl.reduce(tl.where(real[:, None], r, 65504.0), 0, tl.standard._elementwise_min)
        low, gap = widest_gap(phi, real, R.unit)
        phi0, r0 = low.to(tl.float16).to(tl.float32), tl.minimum(shortest, 65504.0).to(tl.float16).to(tl.float32)
        arc = positive_half((FULL - gap) / (1 << K.bits))
        step = positive_half((longest - shortest) / (1 << K.radius_bits))
        tl.store(page16 + K.angle0 + pair, phi0.to(tl.float16))
        tl.store(page16 + K.angle_step + pair, arc.to(tl.float16))
        tl.store(page16 + K.radius0 + pair, r0.to(tl.float16))
        tl.store(page16 + K.radius_step + pair, step.to(tl.float16))
        # measured from the middle of the gap, so that the rounding of phi0 can't wrap an angle around the circle
        rise = phi - phi0[None, :] + gap[None, :] * 0.5
        rise = tl.where(rise < 0, rise + FULL, tl.where(rise >= FULL, rise - FULL, rise)) - gap[None, :] * 0.5
        rise, arc = tl.broadcast(rise, arc[None, :])
        r, step = tl.broadcast(r - r0[None, :], step[None, :])
        a = tl.minimum(tl.maximum(tl.floor(tl.div_rn(rise, arc)), 0.0), (1 << K.bits) - 1).to(tl.int32)
        c = tl.minimum(tl.maximum(tl.floor(tl.div_rn(r, step)), 0.0), (1 << K.radius_bits) - 1)
    return a, c.to(tl.int32), damage


@triton.jit
def _store(words_ptr, data, FIRST, R: tl.constexpr, CODES: tl.constexpr):
    """Bytes (tokens, pairs) as int32 -> words of 4 pairs, from byte FIRST on, into every slab of the page."""
    size: tl.constexpr = data.shape[0]
    width: tl.constexpr = data.shape[1]
    token, four, quad = tl.arange(0, size), tl.arange(0, 4), tl.arange(0, width // 4)
    data = tl.reshape(data, (size, width // 4, 4)) << (8 * four)[None, None, :]
    word = tl.reduce(data, 2, tl.standard._sum_combine)
    slab = R.slabs_at + token // 32 * R.slab_words + CODES + token % 32
    tl.store(words_ptr + slab[:, None] + (FIRST // 4 + quad)[None, :] * 32, word, mask=(token < R.unit)[:, None])


@triton.jit
def polar_keys(tokens, words_ptr, page16, R: tl.constexpr, K: tl.constexpr):
    """One page, of R.tokens `tokens` with those that fill it up to a power of two. K.block pairs lie in one plane."""
    chunks: tl.constexpr = R.d // 2 // K.block
    damage = tl.full((), 0, tl.int32)
    if K.bits + K.radius_bits == 8:
        for i in tl.static_range(chunks):
            a, c, bad = _chunk(tokens, page16, R, K, i)
            damage += bad
            _store(words_ptr, a | (c << 4), i * K.block, R, K.codes)
    else:
        planes: tl.constexpr = 8 // (K.bits if K.bits < K.radius_bits else K.radius_bits)
        width: tl.constexpr = chunks // planes  # chunks in a plane of the smaller code
        a_planes: tl.constexpr = 8 // K.bits
        r_planes: tl.constexpr = 8 // K.radius_bits
        for o in tl.static_range(width):
            angles, radii = (), ()
            for k in tl.static_range(planes):
                a, c, bad = _chunk(tokens, page16, R, K, o + k * width)
                damage += bad
                angles, radii = angles + (a,), radii + (c,)
            for g in tl.static_range(planes * K.bits // 8):
                data = angles[g]
                for t in tl.static_range(1, a_planes):
                    data |= angles[g + t * (planes * K.bits // 8)] << (t * K.bits)
                _store(words_ptr, data, (o + g * width) * K.block, R, K.codes)
            for g in tl.static_range(planes * K.radius_bits // 8):
                data = radii[g]
                for t in tl.static_range(1, r_planes):
                    data |= radii[g + t * (planes * K.radius_bits // 8)] << (t * K.radius_bits)
                _store(words_ptr, data, (o + g * width) * K.block, R, K.radius)
    return damage

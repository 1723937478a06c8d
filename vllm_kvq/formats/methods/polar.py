"""PolarQuant: keys as radius and angle of the channel pairs that RoPE rotates together, values per token (values.py).

A pair is (i, i + d/2) for rotate-half models and (2i, 2i + 1) for interleaved ones; r = |pair|, phi = atan2(y, x).
Two modes, with m bits of angle and n bits of radius:

  paper     phi = code 2 pi / 2^m (round, modulo 2^m);  r = code s,  s = max r / (2^n - 1) per pair and page
  grouped   mid-rise cells, per pair and page:  phi = phi0 + (code + 1/2) dphi,  r = r0 + (code + 1/2) dr
            where phi0 is the first angle after the widest gap on the circle, so that the range is the shortest arc

(The paper encodes phi + pi and decodes without subtracting pi again: taken literally, that returns -K. Here the angle
is phi itself on both sides.)

The parameters span the page of N tokens, so a page is packed when it is complete.

Page (d = 128): 512 bytes grouped, 128 bytes paper
    k_angle0, k_angle_step, k_radius0, k_radius_step   f16 [d / 2]   128 each   pair-minor: a kernel builds the table
                                                                                q_x cos + q_y sin of a page from them
    k_radius_step                                      f16 [d / 2]   128        paper mode
Slab (32 tokens; d = 128): m4n4 2048 bytes, m4n2 1536 bytes
    m = n = 4:  k_polar   u8  [d / 8 quads][32][4]     angle in the low, radius in the high nibble: one byte load
                                                       gives both the table index and the factor
    m = 4, n = 2:  k_angle  u8 [d / 16 quads][32][4]   plane-quad over pairs, each with its own planes, so that
                   k_radius u8 [d / 32 quads][32][4]   6 bits per pair really take 6 bits
    m = 3:  k_angle  u8 [d / 32 quads][32][4]          the low two bits of the angles, and the third as one more plane,
            k_angle_high u8 [d / 64 quads][32][4]      in whole words: only d = 96 pays for rounding d / 64 up
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.methods.values import RawValues, TokenValues
from vllm_kvq.formats.option import PAIRING, Option
from vllm_kvq.formats.parts.fields import Field, Packed, round_up
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import half, positive_half
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.variant import variant

TURN = 2 * math.pi


def pair_order(geometry: Geometry) -> torch.Tensor:
    """(2, d / 2): the x and the y channel of each pair; channels outside RoPE are paired at the end."""
    rotary, d = geometry.rotary, geometry.d
    first = torch.arange(rotary // 2)
    x, y = (first, first + rotary // 2) if geometry.pairing == "half" else (2 * first, 2 * first + 1)
    rest = torch.arange(rotary, d)
    half_rest = len(rest) // 2
    return torch.stack([torch.cat([x, rest[:half_rest]]), torch.cat([y, rest[half_rest:]])])


class PolarKeys(KeyCodec):
    """The grouped grid."""

    name = "polar"
    title = "radius and angle of the channel pairs that RoPE rotates together"
    options = (
        Option("mode", "PolarQuant's grid", "grouped", choices=("grouped", "paper")),
        Option("angle_bits", "PolarQuant's angle bits", 4, choices=(2, 3, 4)),
        Option("radius_bits", "PolarQuant's radius bits", 4, choices=(2, 4)),
        PAIRING,
    )
    pairs_channels = True
    page_wide = True

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> PolarKeys:
        grid = PaperPolarKeys if options["mode"] == "paper" else PolarKeys
        odd = (ThirdBit,) if options["angle_bits"] == 3 else ()
        return variant(grid, *odd)(geometry, options)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.m, self.n = geometry.d, options["angle_bits"], options["radius_bits"]
        self.pairs = geometry.d // 2
        self.x, self.y = pair_order(geometry)
        self.inverse = torch.cat([self.x, self.y]).argsort()
        self.nibbles = self.m == self.n == 4

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        if self.nibbles:
            return (Field("k_polar", torch.uint8, key_code_shape(self.pairs, 8)),)
        return (
            *self._angle_fields,
            Field("k_radius", torch.uint8, key_code_shape(self.pairs, self.n)),
        )

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        a, b = x[..., self.x], x[..., self.y]
        angle, radius, parameters = self._quantize(torch.atan2(b, a), torch.hypot(a, b))
        angle, radius = (c.unflatten(1, (-1, SLAB)).to(torch.uint8) for c in (angle, radius))
        if self.nibbles:
            return {"k_polar": pack_keys(angle | (radius << 4), 8), **parameters}
        return {**self._pack_angles(angle), "k_radius": pack_keys(radius, self.n), **parameters}

    def unpack(self, fields: Packed) -> torch.Tensor:
        if self.nibbles:
            both = unpack_keys(fields["k_polar"], 8)
            angle, radius = both & 15, both >> 4
        else:
            angle, radius = self._unpack_angles(fields), unpack_keys(fields["k_radius"], self.n)
        phi, r = self._dequantize(angle.float().flatten(1, 2), radius.float().flatten(1, 2), fields)
        return torch.cat([r * phi.cos(), r * phi.sin()], dim=-1)[..., self.inverse]

    @property
    def _angle_fields(self) -> tuple[Field, ...]:
        return (Field("k_angle", torch.uint8, key_code_shape(self.pairs, self.m)),)

    def _pack_angles(self, codes: torch.Tensor) -> Packed:
        return {"k_angle": pack_keys(codes, self.m)}

    def _unpack_angles(self, fields: Packed) -> torch.Tensor:
        return unpack_keys(fields["k_angle"], self.m)

    def _quantize(self, phi: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Packed]:
        """(U, N, pairs) angles and radii -> their codes and the page's parameters."""
        low, gap = shortest_arc(phi)
        phi0 = half(low)
        dphi = positive_half((TURN - gap) / 2**self.m)
        # measured from the middle of the gap, so that the rounding of phi0 can't wrap an angle around the circle
        rise = torch.remainder(phi - phi0[:, None] + gap[:, None] / 2, TURN) - gap[:, None] / 2
        r0 = half(r.amin(1))
        dr = positive_half((r.amax(1) - r.amin(1)) / 2**self.n)
        angle = (rise / dphi[:, None]).floor().clamp(0, 2**self.m - 1)
        radius = ((r - r0[:, None]) / dr[:, None]).floor().clamp(0, 2**self.n - 1)
        return angle, radius, {"k_angle0": phi0, "k_angle_step": dphi, "k_radius0": r0, "k_radius_step": dr}

    def _dequantize(
        self, angle: torch.Tensor, radius: torch.Tensor, fields: Packed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        phi0, dphi, r0, dr = (fields[f.name].float()[:, None] for f in self.page_fields)
        return phi0 + (angle + 0.5) * dphi, r0 + (radius + 0.5) * dr

    @property
    def page_fields(self) -> tuple[Field, ...]:
        names = ("k_angle0", "k_angle_step", "k_radius0", "k_radius_step")
        return tuple(Field(n, torch.float16, (self.pairs,)) for n in names)


class PaperPolarKeys(PolarKeys):
    """The fixed angle grid of the paper."""

    @property
    def page_fields(self) -> tuple[Field, ...]:
        return (Field("k_radius_step", torch.float16, (self.pairs,)),)

    def _quantize(self, phi: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Packed]:
        s = positive_half(r.amax(1) / (2**self.n - 1))
        angle = torch.remainder((phi / (TURN / 2**self.m)).round(), 2**self.m)
        radius = (r / s[:, None]).round().clamp(0, 2**self.n - 1)
        return angle, radius, {"k_radius_step": s}

    def _dequantize(
        self, angle: torch.Tensor, radius: torch.Tensor, fields: Packed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return angle * (TURN / 2**self.m), radius * fields["k_radius_step"].float()[:, None]


class ThirdBit:
    """`angle_bits`: 3, which don't fill bytes: two bits in one field, the third in its own."""

    pairs: int

    @property
    def _angle_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_angle", torch.uint8, key_code_shape(self.pairs, 2)),
            Field("k_angle_high", torch.uint8, key_code_shape(self._padded, 1)),
        )

    def _pack_angles(self, codes: torch.Tensor) -> Packed:
        high = torch.nn.functional.pad(codes >> 2, (0, self._padded - self.pairs))
        return {"k_angle": pack_keys(codes & 3, 2), "k_angle_high": pack_keys(high, 1)}

    def _unpack_angles(self, fields: Packed) -> torch.Tensor:
        high = unpack_keys(fields["k_angle_high"], 1)[..., : self.pairs]
        return unpack_keys(fields["k_angle"], 2) | high << 2

    @property
    def _padded(self) -> int:
        """The number of pairs, rounded up so that their bits are whole words."""
        return round_up(self.pairs, 32)


def shortest_arc(phi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first angle, width of the gap before it) of the shortest arc that holds all angles of dimension 1."""
    s = phi.sort(dim=1).values
    gaps = torch.cat([s[:, :1] + TURN - s[:, -1:], s[:, 1:] - s[:, :-1]], dim=1)
    gap, at = gaps.max(dim=1, keepdim=True)
    return s.gather(1, at).squeeze(1), gap.squeeze(1)


FORMATS = (
    Format("polar4", "PolarQuant m4n4", PolarKeys, TokenValues, {"value_bits": 4, "group": 128, "W": 128}),
    Format("polar4_v16", "PolarQuant m4n4, values as they are", PolarKeys, RawValues, {"mode": "paper", "W": 128}),
    Format("polar3", "PolarQuant m4n2", PolarKeys, TokenValues, {"radius_bits": 2, "W": 128}),
)

"""The constant part of a head's keys, as RoPE turns it, held for the 32 tokens of a slab.

RoPE turns a constant part b of keys (a bias of their projection, or what all texts have in common) to R(t) b at
position t, which no single mean takes off. Here every slab has a mean of its own, known without storing anything:

    mu(n) = R(a) b = B e(n)        a = 32 n + 31/2, the middle of slab n
    e(n)  = cos(a theta_0), ..., cos(a theta_(d/2 - 1)), sin(a theta_0), ..., sin(a theta_(d/2 - 1))

theta: by how much a token turns each pair of channels; 0 for channels without RoPE, whose mean is the same everywhere.
`b` is fitted at the middles of slabs, too, so a pair that turns far within a slab has a small one: what is held for 32
tokens is then all that can be held.

Kernels read e(n) from two tables, by the angle sum formulas. n counts modulo FINE * COARSE: beyond a million tokens
means repeat, for those who pack and for those who read alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.rope import Rope

FINE, COARSE = 64, 512
"""Slabs of the tables: all of FINE neighbours, and the first of each of COARSE times as many."""
SLABS = FINE * COARSE
MIDDLE = (SLAB - 1) / 2
NEAR = 0.05
"""How far a table of cosines and sines may be from one that `theta` makes."""


@dataclass(frozen=True, eq=False)
class Turning:
    """How RoPE turns the d channels of a head, in d / 2 pairs."""

    theta: torch.Tensor
    """(d / 2,) float64"""
    first: torch.Tensor
    """(d / 2,) the channels of pairs, each of which turns towards that in `second`."""
    second: torch.Tensor

    @classmethod
    def none(cls, d: int) -> Turning:
        channel = torch.arange(d)
        return cls(torch.zeros(d // 2, dtype=torch.float64), channel[::2], channel[1::2])

    @classmethod
    def of(cls, rope: Rope | None, d: int) -> Turning:
        """As `rope` turns keys; not at all if it is None, or is more than one angle per token and pair."""
        theta = None if rope is None else _theta(rope)
        if rope is None or theta is None:
            return cls.none(d)
        channel, turned = torch.arange(d), rope.rotary_dim
        pairs = channel[:turned].view(2, -1) if rope.pairing == "half" else channel[:turned].view(-1, 2).mT
        first, second = torch.cat([pairs, channel[turned:].view(-1, 2).mT], 1)
        return cls(torch.nn.functional.pad(theta, (0, (d - turned) // 2)), first, second)

    @classmethod
    def of_rows(cls, theta: torch.Tensor, pairs: torch.Tensor) -> Turning:
        """From the rows (d,) that `rows` makes."""
        first, second = pairs.long().chunk(2)
        return cls(theta[: len(first)].double(), first, second)

    def rows(self, d: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(d,) each, for heads with additional channels that nothing turns: theta, then zeros; first, then second."""
        short = d // 2 - len(self.theta)
        more = torch.arange(2 * len(self.theta), d).view(-1, 2).mT
        pairs = torch.cat([torch.stack([self.first, self.second]), more], 1)
        return torch.nn.functional.pad(self.theta, (0, short + d // 2)), pairs.flatten()

    def phases(self, slab: torch.Tensor) -> torch.Tensor:
        """e: (..., d) float32 of slabs (...)."""
        return _cos_sin(((slab % SLABS).double() * SLAB + MIDDLE)[..., None] * self.theta.to(slab.device))

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(FINE, d) and (COARSE, d) float32: e(n) is the first's row n % FINE, turned by the second's n / FINE."""
        theta, at = self.theta.cpu(), torch.arange(max(FINE, COARSE), dtype=torch.float64)[:, None]
        return _cos_sin((SLAB * at[:FINE] + MIDDLE) * theta), _cos_sin(SLAB * FINE * at[:COARSE] * theta)

    def mean(self, turned: torch.Tensor) -> torch.Tensor:
        """b (..., d), from the mean of k e^T (..., d, d) over tokens."""
        half = len(self.first)
        pair = torch.arange(half, device=turned.device)
        x, y = turned[..., self.first, :], turned[..., self.second, :]
        out = turned.new_zeros(turned.shape[:-1])
        out[..., self.first] = x[..., pair, pair] + y[..., pair, half + pair]
        out[..., self.second] = y[..., pair, pair] - x[..., pair, half + pair]
        return out

    def matrix(self, mean: torch.Tensor) -> torch.Tensor:
        """B (..., d, d) with mu = B e, from b (..., d)."""
        half = len(self.first)
        pair = torch.arange(half, device=mean.device)
        out = mean.new_zeros(*mean.shape, mean.shape[-1])
        out[..., self.first, pair], out[..., self.first, half + pair] = mean[..., self.first], -mean[..., self.second]
        out[..., self.second, pair], out[..., self.second, half + pair] = mean[..., self.second], mean[..., self.first]
        return out


def _cos_sin(angle: torch.Tensor) -> torch.Tensor:
    return torch.cat([angle.cos(), angle.sin()], -1).float()


def _theta(rope: Rope) -> torch.Tensor | None:
    """From tokens 1, 2, 4, ... of the table, each twice as exact as the one before: its entries are rounded."""
    angle = _angles(rope.table.double())
    theta, token = angle[1], 2
    while token < len(angle):
        turns = ((theta * token - angle[token]) / (2 * torch.pi)).round()
        theta = (angle[token] + 2 * torch.pi * turns) / token
        token *= 2
    some = torch.arange(0, len(angle), max(1, len(angle) // 1000), device=angle.device)
    off = angle[some] - some[:, None] * theta
    off -= (off / (2 * torch.pi)).round() * 2 * torch.pi
    return theta.cpu() if off.abs().max() <= NEAR else None


def _angles(table: torch.Tensor) -> torch.Tensor:
    cos, sin = table.chunk(2, -1)
    return torch.atan2(sin, cos)

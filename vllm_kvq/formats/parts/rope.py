"""RoPE as a model applies it to queries and keys, for formats that store keys as they were before it.

A pair of channels (a, b) of a token is turned, with the cosine c and the sine s of the pair's angle at its position:

    a' = c a - s b        a = (c a' + s b') / (c^2 + s^2)
    b' = s a + c b        b = (c b' - s a') / (c^2 + s^2)

The table of c and s is the model's own, so exactly what the model did is undone: the table is rounded to the model's
dtype, and some models scale it (YaRN), so c^2 + s^2 is not 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAIRINGS = ("half", "interleaved")
"""Channels (i, i + rotary_dim / 2) turn together, or (2i, 2i + 1)."""


@dataclass(frozen=True, eq=False)
class Rope:
    table: torch.Tensor
    """(positions, rotary_dim): the cosines of all pairs, then their sines."""
    pairing: str = "half"

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing {self.pairing!r} is not one of {', '.join(map(repr, PAIRINGS))}")
        if self.table.dim() != 2 or self.table.shape[1] % 2:
            raise ValueError(f"RoPE's table {tuple(self.table.shape)} is not (positions, an even number of channels)")

    @classmethod
    def plain(cls, rotary_dim: int, positions: int, theta: float = 500_000.0, pairing: str = "half") -> Rope:
        """RoPE of `rotary_dim` channels without scaling: pair j turns by theta^(-2 j / rotary_dim) per token."""
        half = rotary_dim // 2
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * theta ** (-torch.arange(half) / half)
        return cls(torch.cat([angle.cos(), angle.sin()], 1).float(), pairing)

    @property
    def rotary_dim(self) -> int:
        return self.table.shape[1]

    def apply(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """x (..., d) of any dtype -> float32; `position` holds integers that broadcast to x's leading dimensions."""
        return self._turned(x, *self._at(position))

    def undo(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        c, s = self._at(position)
        square = c * c + s * s
        return self._turned(x, c / square, -s / square)

    def _at(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # a damaged page may name any position: its keys may be wrong, but nothing outside of the table is read
        rows = self.table[position.long().clamp(0, len(self.table) - 1)].float()
        c, s = rows.chunk(2, -1)
        return c, s

    def _turned(self, x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        out, half = x.float().clone(), self.rotary_dim // 2
        first, second = slice(0, half), slice(half, 2 * half)
        if self.pairing == "interleaved":
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        a, b = x[..., first].float(), x[..., second].float()
        out[..., first], out[..., second] = a * c - b * s, b * c + a * s
        return out

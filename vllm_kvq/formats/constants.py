"""Constants: what a calibrated codec knows about a layer's KV heads before it packs anything.

They are fitted to a text other than those that are packed later (`Codec.calibrated`). What they are fitted to is either
that text's tensors, `Calibration`, or only sums over its tokens, `Moments`, which a server can compute in passing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import torch

from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.parts.turning import Turning

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Constants:
    """(KV heads, ...) float32 for each half; None for a half that is not calibrated."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __post_init__(self) -> None:
        if self.keys is not None and self.values is not None and len(self.keys) != len(self.values):
            raise ValueError(f"constants of {len(self.keys)} heads' keys and of {len(self.values)} heads' values")

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Constants:
        return Constants(*(None if x is None else change(x) for x in (self.keys, self.values)))


@dataclass(frozen=True, eq=False)
class Calibration:
    """A layer's queries (tokens, query heads, d), keys and values (tokens, KV heads, d), as passed to the cache."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    turned: Rope | None = None
    """The RoPE already applied to keys and queries, token t at position t; None: it is not known."""

    def __post_init__(self) -> None:
        if self.key.shape != self.value.shape or self.query.dim() != 3 or self.query.shape[1] % self.key.shape[1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (self.query, self.key, self.value))
            raise ValueError(f"queries, keys and values {shapes} are not those of one layer")

    @property
    def grouped(self) -> torch.Tensor:
        """Queries by KV head: (KV heads, tokens * group, d)."""
        return grouped(self.query, self.key.shape[1])


def grouped(query: torch.Tensor, heads: int) -> torch.Tensor:
    """(tokens, query heads, d) -> (KV heads, tokens * group, d)."""
    return query.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over tokens, float64, for each of H KV heads. Those of several texts add up, and so do those of tensor
    parallel ranks that hold copies of the same heads."""

    tokens: torch.Tensor
    """(H,)"""
    key: torch.Tensor
    """(H, d): of k."""
    keys: torch.Tensor
    """(H, d, d): of k k^T."""
    reads: torch.Tensor
    """(H,): the number of queries."""
    queries: torch.Tensor
    """(H, d, d): of q q^T."""
    turned: torch.Tensor
    """(H, d, d): of k e^T, with e of the token's slab (parts/turning.py)."""
    phases: torch.Tensor
    """(H, d, d): of e e^T."""

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, phases: torch.Tensor | None = None) -> Moments:
        """query (tokens, query heads, d), key (tokens, KV heads, d); phases (tokens, d), None: as if nothing turned."""
        q, k = grouped(query, key.shape[1]).double(), key.transpose(0, 1).double()
        if phases is None:
            phases = Turning.none(k.shape[-1]).phases(torch.zeros(k.shape[1], dtype=torch.int64, device=k.device))
        e = phases.double()
        count = torch.full((len(k),), 1.0, dtype=torch.float64, device=k.device)
        squares = (e.mT @ e).expand(len(k), -1, -1)
        return cls(count * k.shape[1], k.sum(1), k.mT @ k, count * q.shape[1], q.mT @ q, k.mT @ e, squares)

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def mean(self) -> torch.Tensor:
        """(H, d)"""
        return self.key / self.tokens[:, None]

    @property
    def covariance(self) -> torch.Tensor:
        """(H, d, d), of keys."""
        return self.keys / self.tokens[:, None, None] - self.mean[:, :, None] * self.mean[:, None]

    def turned_mean(self, turning: Turning) -> torch.Tensor:
        """(H, d): b, if the phases are those of `turning`."""
        return turning.mean(self.turned / self.tokens[:, None, None])

    def turned_covariance(self, turning: Turning) -> torch.Tensor:
        """(H, d, d), of keys less the means of their slabs."""
        matrix = turning.matrix(self.turned_mean(turning))
        of_both = self.turned @ matrix.mT
        off = self.keys - of_both - of_both.mT + matrix @ self.phases @ matrix.mT
        return off / self.tokens[:, None, None]

    @property
    def seen(self) -> torch.Tensor:
        """(H, d, d): the mean of q q^T."""
        return self.queries / self.reads[:, None, None]


def known(constants: T | None, name: str) -> T:
    """Raises ValueError where a calibrated codec has none yet."""
    if constants is None:
        raise ValueError(f"{name} has constants that are fitted to another text, and none are given")
    return constants


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Pack units times heads, (n * H, ...), heads fastest -> (n, H, ...)."""
    return x.unflatten(0, (-1, heads))


def not_served(name: str) -> str:
    """`Codec.reference_only` of a codec whose constants need the text's tensors."""
    return (
        f"{name} has constants that are fitted to the tensors of a calibration text, which a server does not keep; "
        "measure it with `vllm-kvq eval heads`, or serve kitty2"
    )

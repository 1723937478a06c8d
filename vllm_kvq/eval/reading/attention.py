"""Attention whose queries read what a decode step would read at their position.

A decode step after t tokens reads positions from S to below floor((t - W) / P) P from pages, and all others exactly.
That boundary only grows, and only every P positions, so queries are processed in runs that share it: keys and values
start out exact, and before a run attends, those that it may no longer see exactly are overwritten from the pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_kvq.formats import PageFormat

TOGETHER = 32
"""Queries at once, with no boundary of any format between them. The same for all formats, so equal inputs are computed
equally."""


@dataclass(frozen=True)
class Scores:
    """What a layer applies to q . k before the softmax."""

    scale: float
    cap: float | None = None
    """Gemma 2's cap tanh(s / cap)."""
    window: int | None = None
    """The number of tokens seen, including the query's own; None: all."""


@dataclass(frozen=True)
class Packed:
    """What pages hold for the first tokens, and the position from which a query reads exact ones."""

    key: torch.Tensor
    """(KV heads, tokens, d)"""
    value: torch.Tensor
    sinks: int
    unit: int
    window: int
    key_window: int

    @classmethod
    def of(cls, page: PageFormat, key: torch.Tensor, value: torch.Tensor) -> Packed:
        """From (tokens, heads, d), as `through_pages` gives them."""
        return cls(key.transpose(0, 1), value.transpose(0, 1), page.S, page.unit, page.W, page.W_keys)

    def ends(self, position: int) -> tuple[int, int]:
        """The numbers of keys and of values that a query at this position reads from pages."""
        return boundary(self.unit, self.key_window, position), boundary(self.unit, self.window, position)


def boundary(unit: int, window: int, position: int) -> int:
    return max(0, (position - window) // unit * unit)


def runs(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Positions from `begin` to `end` in pieces that read the same pages: their size divides windows and units."""
    while begin < end:
        stop = min(end, (begin // TOGETHER + 1) * TOGETHER)
        yield begin, stop
        begin = stop


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, packed: Packed | None = None
) -> torch.Tensor:
    """(query heads, n, d) of the last n of all tokens; keys and values are (KV heads, tokens, d); all are float32."""
    heads, tokens, _ = key.shape
    first = tokens - query.shape[1]
    grouped = query.unflatten(0, (heads, -1))
    out = query.new_empty(*grouped.shape[:3], value.shape[-1])
    if packed is not None:
        key, value = key.clone(), value.clone()
        done = [min(packed.sinks, tokens)] * 2
    position = torch.arange(tokens)
    for begin, end in runs(first, tokens):
        if packed is not None:
            for i, (exact, read, stop) in enumerate(
                zip((key, value), (packed.key, packed.value), packed.ends(begin), strict=True)
            ):
                if stop > done[i]:
                    exact[:, done[i] : stop] = read[:, done[i] : stop]
                    done[i] = stop
        low = 0 if scores.window is None else max(0, begin - scores.window + 1)
        q = grouped[:, :, begin - first : end - first] * scores.scale
        s = (q.flatten(1, 2) @ key[:, low:end].transpose(1, 2)).unflatten(1, q.shape[1:3])
        if scores.cap is not None:
            s = scores.cap * (s / scores.cap).tanh()
        own, seen = position[begin:end, None], position[None, low:end]
        hidden = seen > own
        if scores.window is not None:
            hidden |= seen <= own - scores.window
        s.masked_fill_(hidden, -torch.inf)
        weights = s.softmax(-1).flatten(1, 2)
        out[:, :, begin - first : end - first] = (weights @ value[:, low:end]).unflatten(1, q.shape[1:3])
    return out.flatten(0, 1)

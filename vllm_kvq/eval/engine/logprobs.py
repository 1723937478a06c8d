"""Next-token distributions of a run of tokens, complete or cut to the most probable tokens, and the divergence of two
of them.

    KL(p || q) = sum over cells of p (ln p - ln q)

A cell is a token of the vocabulary. If only the most probable tokens are kept, the cells are the tokens that both
distributions list, plus one that holds all the rest; a coarser partition gives a smaller divergence, so the result is
a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS = 256
"""Rows that are compared at once, which limits the memory."""
SMALLEST = 1e-12
"""The smallest probability of the rest, below which it is only rounding."""


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities, a row per token."""

    token: np.ndarray
    """(rows,) the token that followed."""
    chosen: np.ndarray
    """(rows,) the logarithm of its probability."""
    values: np.ndarray
    """(rows, vocabulary), or (rows, K) for the tokens in `ids`, the most probable first."""
    ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token)

    @property
    def whole(self) -> bool:
        return self.ids is None

    @property
    def best(self) -> np.ndarray:
        """(rows,) the most probable token."""
        return self.values.argmax(1) if self.ids is None else self.ids[:, 0]

    def after(self, rows: int) -> Logprobs:
        """The same without the first rows."""
        return Logprobs.of({name: array[rows:] for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, np.ndarray]:
        found = {"token": self.token, "chosen": self.chosen, "values": self.values}
        return found if self.ids is None else {**found, "ids": self.ids}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Logprobs:
        return cls(arrays["token"], arrays["chosen"], arrays["values"], arrays.get("ids"))

    @classmethod
    def of_flat(cls, flat: Any, whole: bool) -> Logprobs:
        """From vLLM's FlatLogprobs, whose rows begin with the token that followed; a prompt's first row is empty.

        `whole`: the rest of each row is the whole vocabulary.
        """
        rows = sum(end > start for start, end in zip(flat.start_indices, flat.end_indices, strict=True))
        ids = np.fromiter(flat.token_ids, np.int32, len(flat.token_ids)).reshape(rows, -1)
        values = np.fromiter(flat.logprobs, np.float32, len(flat.logprobs)).reshape(rows, -1)
        token, chosen = ids[:, 0].copy(), values[:, 0].copy()
        ids, values = ids[:, 1:], values[:, 1:]
        if not whole:
            return cls(token, chosen, values.copy(), ids.copy())
        by_id = np.empty_like(values)
        np.put_along_axis(by_id, ids.astype(np.int64), values, 1)
        return cls(token, chosen, by_id)


def joined(runs: Sequence[Logprobs]) -> Logprobs:
    """Concatenates them."""
    parts = [run.arrays() for run in runs]
    return Logprobs.of({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def divergence(p: Logprobs, q: Logprobs) -> np.ndarray:
    """KL(p || q) of each row, in float64, of runs of the same tokens."""
    if not np.array_equal(p.token, q.token) or p.whole != q.whole:
        raise ValueError("only distributions of the same tokens, kept in the same way, can be compared")
    rows = [slice(i, i + ROWS) for i in range(0, len(p), ROWS)]
    one = _whole if p.whole else _partial
    return np.concatenate([one(p, q, part) for part in rows]) if rows else np.zeros(0)


def _whole(p: Logprobs, q: Logprobs, rows: slice) -> np.ndarray:
    return _sum(p.values[rows].astype(np.float64), q.values[rows].astype(np.float64))


def _partial(p: Logprobs, q: Logprobs, rows: slice) -> np.ndarray:
    assert p.ids is not None
    assert q.ids is not None
    same = p.ids[rows, :, None] == q.ids[rows, None, :]
    at, both = same.argmax(2), same.any(2)
    ours = np.where(both, p.values[rows], -np.inf).astype(np.float64)
    theirs = np.where(both, np.take_along_axis(q.values[rows], at, 1), -np.inf).astype(np.float64)
    return _sum(_with_rest(ours), _with_rest(theirs))


def _with_rest(x: np.ndarray) -> np.ndarray:
    rest = np.log(np.maximum(1 - np.exp(x).sum(1, keepdims=True), SMALLEST))
    return np.concatenate([x, rest], 1)


def _sum(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Cells to which `p` gives no probability add nothing. Rounding can leave a sum just below zero."""
    possible = np.isfinite(p)
    difference = np.subtract(p, q, out=np.zeros_like(p), where=possible)
    return np.maximum((np.exp(p) * difference).sum(1), 0.0)

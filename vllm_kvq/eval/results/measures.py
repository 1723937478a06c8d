"""From numbers of single tokens and answers to figures with 95 % confidence intervals.

Sequences are independent of each other, but the tokens of one are not: the bootstrap therefore draws whole sequences,
with replacement, from a seed. With only a few sequences its intervals are somewhat too narrow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_kvq.eval.results.result import Bin, Curve, Estimate

DRAWS = 1000
QUANTILE_DRAWS = 200
"""The number of bootstrap draws, each over all tokens."""
INTERVAL = (2.5, 97.5)
"""Percentiles of the draws."""
MOST_BINS = 8

Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Values:
    """Numbers, and the sequence of each."""

    value: np.ndarray
    sequence: np.ndarray

    def __post_init__(self) -> None:
        if self.value.shape != self.sequence.shape:
            raise ValueError(f"{self.value.shape} numbers and {self.sequence.shape} sequences do not belong together")

    def where(self, mask: np.ndarray) -> Values:
        return Values(self.value[mask], self.sequence[mask])

    def weights(self, draws: int = DRAWS) -> np.ndarray:
        """(draws, sequences): how often each sequence is drawn; the first row is the data as they are."""
        count = len(np.unique(self.sequence))
        rng = np.random.default_rng(0)
        drawn = rng.multinomial(count, np.full(count, 1 / count), draws)
        return np.concatenate([np.ones((1, count)), drawn])

    @property
    def index(self) -> np.ndarray:
        return np.unique(self.sequence, return_inverse=True)[1]


def mean(values: Values, after: Statistic = lambda x: x) -> Estimate:
    """`after` is applied to the mean, in each draw: the root of a mean square, a perplexity."""
    index, weights = values.index, values.weights()
    sums = np.bincount(index, values.value.astype(np.float64))
    counts = np.bincount(index)
    return _estimate(after((weights @ sums) / (weights @ counts)), weights.shape[1])


def quantile(values: Values, q: float) -> Estimate:
    """The smallest number that at least a share q of the values does not exceed."""
    order = np.argsort(values.value, kind="stable")
    ordered, index, weights = values.value[order], values.index[order], values.weights(QUANTILE_DRAWS)
    found = np.empty(len(weights))
    for i, weight in enumerate(weights):
        below = np.cumsum(weight[index])
        found[i] = ordered[np.searchsorted(below, q * below[-1] - 1e-9)]
    return _estimate(found, weights.shape[1])


def _estimate(draws: np.ndarray, sequences: int) -> Estimate:
    if sequences < 2:
        return Estimate(float(draws[0]))
    low, high = np.percentile(draws[1:], INTERVAL)
    return Estimate(float(draws[0]), float(low), float(high))


def root(x: np.ndarray) -> np.ndarray:
    return np.sqrt(x)


def perplexity(logprob: Values) -> Estimate:
    return mean(Values(-logprob.value, logprob.sequence), np.exp)


def curve(values: Values, along: np.ndarray, edges: np.ndarray) -> Curve:
    """The mean between each two neighbouring edges, the last one included; empty bins are left out."""
    bins = []
    last = len(edges) - 2
    for i, (begin, end) in enumerate(itertools.pairwise(edges)):
        mask = (along >= begin) & ((along <= end) if i == last else (along < end))
        if mask.any():
            bins.append(Bin(float(begin), float(end), int(mask.sum()), mean(values.where(mask))))
    return tuple(bins)


def position_edges(length: int) -> np.ndarray:
    return np.linspace(0, length, MOST_BINS + 1)


def depth_edges() -> np.ndarray:
    return np.linspace(0, 1, 6)


def step_edges(steps: np.ndarray) -> np.ndarray:
    """A bin for each number of steps, or equal bins where there are many."""
    low, high = int(steps.min()), int(steps.max())
    if high - low < 2 * MOST_BINS:
        return np.arange(low, high + 2, dtype=np.float64)
    return np.linspace(low, high, MOST_BINS + 1)

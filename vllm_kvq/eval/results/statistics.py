"""The claims of a comparison of formats: paired by text, adjusted for the number of claims of one table.

A text that is hard for one format is also hard for the other, so formats are compared text by text: by the logarithm
of the ratio of their mean KL divergences. Texts are drawn with replacement, and the studentized mean of each draw shows
how far a mean strays (symmetric bootstrap-t): this gives a p-value and intervals that agree with each other, and keeps
its level with few texts, for which percentiles of drawn means are too narrow. Right and wrong answers are compared by
McNemar's exact test. Holm's step-down method adjusts all claims of a table together; the interval of a claim has the
level that Holm gives it, so it excludes 1 exactly when the claim holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_kvq.eval.choice import FP8
from vllm_kvq.eval.results.result import Claim, Row
from vllm_kvq.formats.table import PLAIN

ALPHA = 0.05
"""The chance of any claim in a table if there is no difference."""
DRAWS = 20_000
FEWEST = 6
"""The number of texts that a claim needs: draws of fewer too often repeat a single text."""
FLOOR = 1e-7
"""Nats per token: a smaller divergence is rounding."""


@dataclass(frozen=True)
class Paired:
    """Logarithms of ratios, one per text, and how far their mean strays."""

    mean: float
    error: float
    """The standard error of the mean."""
    strays: np.ndarray
    """The sorted magnitudes of (mean of the draw - mean) / standard error of the draw, for all draws."""

    @classmethod
    def of(cls, logs: np.ndarray, seed: int = 0) -> Paired:
        count = len(logs)
        if count < FEWEST:
            raise ValueError(f"{count} texts are too few for a claim; it takes {FEWEST}")
        drawn = logs[np.random.default_rng(seed).integers(count, size=(DRAWS, count))]
        errors = drawn.std(1, ddof=1) / math.sqrt(count)
        away = np.abs(drawn.mean(1) - logs.mean())
        with np.errstate(divide="ignore", invalid="ignore"):
            strays = np.where(away > 0, away / errors, 0.0)
        return cls(float(logs.mean()), float(logs.std(ddof=1) / math.sqrt(count)), np.sort(strays))

    @property
    def p(self) -> float:
        """The p-value for a mean of 0."""
        if self.error == 0:
            return 1.0 if self.mean == 0 else 1 / (1 + DRAWS)
        beyond = DRAWS - np.searchsorted(self.strays, abs(self.mean) / self.error - 1e-12)
        return float((1 + beyond) / (1 + DRAWS))

    def interval(self, level: float) -> tuple[float, float]:
        """The interval of the ratio; it excludes 1 exactly when p <= level."""
        if self.error == 0:
            return math.exp(self.mean), math.exp(self.mean)
        # the least stray beyond which fewer than level * (1 + DRAWS) - 1 lie
        most = math.floor(level * (1 + DRAWS) + 1e-9) - 1
        reach = math.inf if most < 0 else float(self.strays[DRAWS - 1 - min(most, DRAWS - 1)])
        low, high = self.mean - reach * self.error, self.mean + reach * self.error
        return math.exp(low) if low > -700 else 0.0, math.exp(high) if high < 700 else math.inf


def log_ratios(ours: Sequence[float], theirs: Sequence[float]) -> np.ndarray:
    return np.log(np.maximum(ours, FLOOR)) - np.log(np.maximum(theirs, FLOOR))


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Two-sided exact p-value, from the answers that only one of the two has right."""
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    several, fewer = gained + lost, min(gained, lost)
    tail = sum(math.comb(several, k) for k in range(fewer + 1)) / 2**several
    return min(1.0, 2 * tail)


def holm(p: Sequence[float]) -> list[float]:
    """The level that each p-value must meet for the chance of any false claim to be at most `ALPHA`.

    From the smallest on: ALPHA / m, ALPHA / (m - 1), and so on, until one misses its level, which then applies to the
    rest.
    """
    levels = [0.0] * len(p)
    missed: float | None = None
    for place, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        levels[i] = ALPHA / (len(p) - place) if missed is None else missed
        if missed is None and p[i] > levels[i]:
            missed = levels[i]
    return levels


# -- claims of a table -----------------------------------------------------------------------------------------------
def claims(rows: Iterable[Row], baseline: str | None = None) -> tuple[Claim, ...]:
    """The claims of every table: each format against the baseline, given by its label; None: `usual_baseline`."""
    found: list[Claim] = []
    tables: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.texts and row.format != PLAIN:
            tables.setdefault((row.regime, row.task, row.context), []).append(row)
    for same in tables.values():
        theirs = next((row for row in same if row.label == (baseline or usual_baseline(same))), None)
        if theirs is not None:
            found += _adjusted([claim for ours in same if ours is not theirs for claim in _of_pair(ours, theirs)])
    return tuple(found)


def usual_baseline(rows: Sequence[Row]) -> str:
    """vLLM's fp8 if it was measured, else the first format."""
    return next((row.label for row in rows if row.format == FP8), rows[0].label)


def _of_pair(ours: Row, theirs: Row) -> Iterator[tuple[Claim, Paired | None]]:
    """Claims with unadjusted p-values, and the data for their intervals."""
    others = {text.name: text for text in theirs.texts}
    pairs = [(text, others[text.name]) for text in ours.texts if text.name in others]
    if any(a.sha != b.sha for a, b in pairs):
        raise ValueError(f"{ours.label} and {theirs.label} were measured on different texts of the same name")
    about = ours.label, theirs.label, ours.regime, ours.task, ours.context
    if len(pairs) >= FEWEST:
        paired = Paired.of(log_ratios([a.kl for a, _ in pairs], [b.kl for _, b in pairs]))
        yield Claim(*about, "kl", len(pairs), math.exp(paired.mean), paired.p), paired
    answers = [(x, y) for a, b in pairs for x, y in zip(a.right, b.right, strict=True)]
    if answers:
        right, other = zip(*answers, strict=True)
        difference = (sum(right) - sum(other)) / len(answers)
        yield Claim(*about, "right", len(pairs), difference, mcnemar(right, other)), None


def _adjusted(alone: list[tuple[Claim, Paired | None]]) -> list[Claim]:
    found = []
    for (claim, paired), level in zip(alone, holm([claim.p for claim, _ in alone]), strict=True):
        low, high = (math.nan, math.nan) if paired is None else paired.interval(level)
        found.append(replace(claim, level=level, low=low, high=high))
    return found

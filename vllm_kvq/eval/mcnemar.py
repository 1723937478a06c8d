"""McNemar's exact test: two ways of answering the same questions, right or wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """How many questions each pair of verdicts has."""

    both: int
    lost: int
    """Right with the baseline only."""
    won: int
    """Right without it only."""
    neither: int

    @classmethod
    def of(cls, baseline: Iterable[bool], other: Iterable[bool]) -> Paired:
        pairs = [(bool(b), bool(o)) for b, o in zip(baseline, other, strict=True)]
        count = pairs.count
        return cls(count((True, True)), count((True, False)), count((False, True)), count((False, False)))

    @property
    def p(self) -> float:
        """Two-sided: how probable a split as uneven as this one is where both are as good as each other."""
        return mcnemar_exact(self.lost, self.won)


def mcnemar_exact(lost: int, won: int) -> float:
    """Of the questions that only one of two answers right, each is as likely to be either's: a binomial test."""
    if min(lost, won) < 0:
        raise ValueError(f"{lost} and {won} are not numbers of questions")
    n, k = lost + won, min(lost, won)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)

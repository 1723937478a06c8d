"""McNemar's exact test against SciPy's binomial test and against all splits counted."""

from __future__ import annotations

import itertools

import pytest

from vllm_kvq.eval.mcnemar import Paired, mcnemar_exact


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (3, 3), (1, 8), (9, 2), (5, 12)])
def test_it_counts_splits(lost: int, won: int) -> None:
    """Of all ways in which the questions could have gone, those that are as uneven or more so."""
    n = lost + won
    splits = [abs(2 * sum(way) - n) >= abs(lost - won) for way in itertools.product((0, 1), repeat=n)]
    assert mcnemar_exact(lost, won) == pytest.approx(sum(splits) / 2**n)


def test_many_questions_do_not_overflow() -> None:
    assert mcnemar_exact(3000, 3000) == 1
    assert 0 < mcnemar_exact(2800, 3200) < 1e-6


def test_it_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="-1"):
        mcnemar_exact(-1, 3)


def test_pairs_are_counted() -> None:
    paired = Paired.of([True, True, True, False, False], [True, False, False, True, False])
    assert paired == Paired(both=1, lost=2, won=1, neither=1)
    assert paired.p == mcnemar_exact(2, 1) == 1
    with pytest.raises(ValueError):
        Paired.of([True], [])

"""What `vllm-kvq calibrate` chooses, with made-up errors and bits."""

from __future__ import annotations

import pytest

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.heads.assign import Assignment, best, by_layer, servable
from vllm_kvq.eval.heads.heads import HeadError

SMALL, LARGE = Choice("squat2"), Choice("squat4", {"W": 64})
MEASURED = {SMALL.label: {0: 0.04, 1: 0.64, 3: 0.01}, LARGE.label: {0: 0.01, 1: 0.16, 3: 0.0025}}


def bits(choice: Choice) -> float:
    """The bits of layers of one size."""
    skipped = len(choice.options.get("skip_layers", ()))
    return ({"squat2": 3.0, "squat4": 5.0}[choice.format] * (3 - skipped) + 16.0 * skipped) / 3


def test_layers_have_the_mean_square_of_their_heads() -> None:
    found = by_layer([HeadError(2, 0, 9.0, 9.0, 0.1), HeadError(2, 1, 9.0, 9.0, 0.3), HeadError(5, 0, 9.0, 9.0, 0.2)])
    assert found == pytest.approx({2: 0.05, 5: 0.04})


def test_the_worst_layers_go_first() -> None:
    found = list(servable(MEASURED, [SMALL], bits, 12.0))
    assert [c.assignment.choice.options.get("skip_layers", []) for c in found] == [[], [1], [0, 1]]
    assert [c.bits for c in found] == [3.0, 22 / 3, 35 / 3]
    assert [c.error for c in found] == pytest.approx([(0.69 / 3) ** 0.5, (0.05 / 3) ** 0.5, (0.01 / 3) ** 0.5])


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (2.9, None),
        (3.0, SMALL),
        (4.9, SMALL),
        (5.0, LARGE),
        # both can leave layer 1 out; at 22 / 3 only the small one
        (22 / 3, Choice("squat2", {"skip_layers": [1]})),
        (26 / 3, Choice("squat4", {"W": 64, "skip_layers": [1]})),
    ],
)
def test_the_least_error_within_the_budget(budget: float, wanted: Choice | None) -> None:
    kept = best(servable(MEASURED, [SMALL, LARGE], bits, budget), budget)
    assert (kept and kept.assignment.choice) == wanted


def test_what_would_not_start_is_no_candidate() -> None:
    """A GPU refuses layers in 16 bits."""
    found = list(servable(MEASURED, [SMALL], lambda c: None if "skip_layers" in c.options else bits(c), 12.0))
    assert [c.assignment.choice for c in found] == [SMALL]
    assert list(servable(MEASURED, [SMALL], lambda choice: None, 12.0)) == []


def test_a_server_has_one_format() -> None:
    with pytest.raises(ValueError, match="one format for all packed layers, not 2"):
        _ = Assignment({0: SMALL, 1: LARGE}).choice
    with pytest.raises(ValueError, match="not 0"):
        _ = Assignment({0: None}).choice

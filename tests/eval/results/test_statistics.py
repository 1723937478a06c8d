"""Claims on made-up data whose answer is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vllm_kvq.eval.results.result import BETTER, READING, TEACHER_FORCED, WORSE, Row, TextFigures
from vllm_kvq.eval.results.statistics import ALPHA, FEWEST, Paired, claims, holm, mcnemar


def row(name: str, kl: np.ndarray, right: Any = None, **more: Any) -> Row:
    """A text for each figure."""
    answers = [()] * len(kl) if right is None else right
    texts = [
        TextFigures(f"text {i}", "prose", (), str(i), 100, float(x), a)
        for i, (x, a) in enumerate(zip(kl, answers, strict=True))
    ]
    about: dict[str, Any] = {"task": "text", "regime": READING, "context": 1024, "sequences": len(kl), "bits": 3.0}
    return Row("m", name, {}, **{**about, **more}, texts=tuple(texts))


@pytest.mark.parametrize("count", [6, 24])
@pytest.mark.parametrize("skewed", [False, True])
def test_an_interval_holds_the_truth_as_often_as_it_says(count: int, skewed: bool) -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        x = rng.exponential(size=count) - 1 if skewed else rng.normal(size=count)
        low, high = Paired.of(0.3 + x, seed=i).interval(0.05)
        inside += low <= math.exp(0.3) <= high
    assert 0.88 <= inside / 200 <= 1


def test_more_texts_give_a_narrower_interval() -> None:
    """The control: an interval that contained everything would pass the test above."""
    x = np.random.default_rng(0).normal(size=96)
    few, many = (Paired.of(part).interval(0.05) for part in (x[:6], x))
    assert math.log(many[1] / many[0]) < 0.45
    assert math.log(few[1] / few[0]) > math.log(many[1] / many[0])


@pytest.mark.parametrize("level", [0.05, 0.01, 0.004])
def test_an_interval_excludes_one_exactly_where_p_meets_the_level(level: float) -> None:
    rng = np.random.default_rng(0)
    verdicts = set()
    for i in range(100):
        paired = Paired.of(rng.normal(0.4, 0.7, size=12), seed=i)
        low, high = paired.interval(level)
        assert (paired.p <= level) == (low > 1 or high < 1)
        verdicts.add(paired.p <= level)
    assert verdicts == {True, False}


def test_no_false_claims_where_nothing_differs() -> None:
    """Ten formats that differ from the baseline only by chance: claims appear in at most ALPHA of the tables."""
    rng = np.random.default_rng(0)
    claimed = 0
    for _ in range(60):
        hard = rng.normal(size=12)
        rows = [row(name, np.exp(hard + 0.3 * rng.normal(size=12))) for name in ("fp8", *(f"f{i}" for i in range(10)))]
        claimed += any(claim.verdict for claim in claims(rows))
    assert claimed / 60 <= ALPHA + 3 * math.sqrt(ALPHA / 60)


def test_pairs_see_what_the_texts_hide() -> None:
    """One format has nine tenths of the other's divergence on every text; texts differ a hundredfold."""
    rng = np.random.default_rng(0)
    hard = np.exp(2 * rng.normal(size=24))
    noise = lambda: np.exp(0.02 * rng.normal(size=24))  # noqa: E731
    found = claims([row("fp8", hard * noise()), row("good", 0.9 * hard * noise()), row("bad", 1.5 * hard * noise())])
    assert {claim.label: claim.verdict for claim in found} == {"good": BETTER, "bad": WORSE}
    good = found[0]
    assert good.low < 0.9 < good.high
    assert good.high < 1
    # the control: other texts in the same order are not pairs
    shuffled = claims([row("fp8", hard), row("good", 0.9 * rng.permutation(hard))])
    assert shuffled[0].verdict is None


def test_holm_goes_from_the_smallest_on_and_stops() -> None:
    assert holm([0.03, 0.001, 0.02, 0.2]) == pytest.approx([0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])
    assert holm([0.03, 0.001, 0.012, 0.02]) == pytest.approx([0.05, 0.05 / 4, 0.05 / 3, 0.05 / 2])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(0, 0, 1), (5, 5, 1), (6, 0, 2 / 64), (8, 1, 2 * 10 / 512), (1, 8, 2 * 10 / 512)]
)
def test_mcnemar_counts_only_answers_that_differ(gained: int, lost: int, p: float) -> None:
    ours = [True] * gained + [False] * lost + [True, False] * 50
    theirs = [False] * gained + [True] * lost + [True, False] * 50
    assert mcnemar(ours, theirs) == pytest.approx(p)


def test_right_answers_are_claims_of_the_same_table() -> None:
    kl = np.ones(8)
    one, two = [(True, True)] * 8, [(False, True)] * 8
    found = claims([row("fp8", kl, two), row("good", kl * 0.5, one)])
    assert [(c.metric, c.verdict) for c in found] == [("kl", BETTER), ("right", BETTER)]
    assert found[1].value == 0.5
    assert {c.level for c in found} == {ALPHA, ALPHA / 2}


def test_a_baseline_by_name_and_tables_by_length() -> None:
    rows = [row(name, np.full(8, x), context=c) for c in (64, 128) for name, x in (("kivi2", 0.1), ("kitty2", 0.05))]
    found = claims([row("auto", np.zeros(8), context=64), *rows], baseline="kitty2")
    assert [(c.label, c.baseline, c.context, c.verdict) for c in found] == [
        ("kivi2", "kitty2", 64, WORSE),
        ("kivi2", "kitty2", 128, WORSE),
    ]
    assert {c.baseline for c in claims(rows)} == {"kivi2"}
    assert claims(rows, baseline="polar4") == ()


def test_few_texts_claim_nothing() -> None:
    few = [row(name, np.full(FEWEST - 1, x)) for name, x in (("fp8", 0.1), ("kivi2", 9.0))]
    assert claims(few) == ()
    with pytest.raises(ValueError, match="5 texts are too few"):
        Paired.of(np.zeros(FEWEST - 1))


def test_other_texts_are_no_pairs() -> None:
    one, other = (row(name, np.full(8, 0.1)) for name in ("fp8", "kivi2"))
    changed = tuple(TextFigures(**{**vars(text), "sha": "x"}) for text in other.texts)
    with pytest.raises(ValueError, match="different texts of the same name"):
        claims([one, Row(**{**vars(other), "texts": changed})])


def test_fp8_is_the_usual_baseline_wherever_it_stands() -> None:
    rows = [row(name, np.full(8, x)) for name, x in (("kivi2", 0.2), ("fp8", 0.1), ("kitty2", 0.1))]
    assert [(c.label, c.baseline) for c in claims(rows)] == [("kivi2", "fp8"), ("kitty2", "fp8")]


def test_tables_of_other_regimes_and_tasks_are_other_tables() -> None:
    """Each has its own baseline, and its claims are adjusted for no others."""
    kinds: list[dict[str, Any]] = [{}, {"regime": TEACHER_FORCED}, {"task": "recall"}]
    rows = [row(name, np.full(8, x), **kind) for kind in kinds for name, x in (("fp8", 0.1), ("kivi2", 0.2))]
    found = claims(rows)
    assert [(c.regime, c.task) for c in found] == [(READING, "text"), (TEACHER_FORCED, "text"), (READING, "recall")]
    assert {(c.label, c.level, round(c.value, 6)) for c in found} == {("kivi2", ALPHA, 2.0)}


def test_the_same_texts_give_the_same_claim() -> None:
    logs = np.random.default_rng(0).normal(0.4, 0.7, size=12)
    one, again, other = Paired.of(logs), Paired.of(logs), Paired.of(logs, seed=1)
    assert (one.p, one.interval(0.01)) == (again.p, again.interval(0.01))
    assert not np.array_equal(one.strays, other.strays)

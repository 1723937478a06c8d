"""Rows as files and as tables."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from vllm_kvq.eval.results import report
from vllm_kvq.eval.results.result import DECODING, TEACHER_FORCED, Bin, Claim, Estimate, Hurt, Results, Row

FULL = Row(
    "model", "squat2", {"r": 8}, "recall", TEACHER_FORCED, 1024, 4, 3.25, 2.91, kl_is_bound=True,
    metrics={"kl": Estimate(0.1, 0.05, 0.2), "accuracy": Estimate(0.75, 0.5, 1), "perplexity": Estimate(12.3456)},
    by_depth={"accuracy": (Bin(0, 0.5, 3, Estimate(1, 0.9, 1)),)},
    by_steps={"accuracy": (Bin(1, 2, 3, Estimate(1, 0.9, 1)), Bin(2, 3, 1, Estimate(0, 0, 1)))},
    hurt=(Hurt("a", "b", "c", 3, 2.0, 0.1, 0.3),),
)  # fmt: skip
REFUSED = Row("model", "innerq2", {}, "recall", TEACHER_FORCED, 1024, 0, None, problem="no room for its sinks")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results((FULL, REFUSED)).save(path)
    full, refused = Results.load(path).rows
    assert refused == REFUSED
    assert math.isnan(full.metrics["perplexity"].low)
    assert {**full.document()} == {**FULL.document()}
    assert full.hurt == FULL.hurt
    assert (full.by_depth, full.by_steps) == (FULL.by_depth, FULL.by_steps)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0, "rows": []}', '{"rows": []}'])
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results of `vllm-kvq eval`"):
        Results.load(path)


def test_rows_refuse_unknown_names() -> None:
    with pytest.raises(ValueError, match="metric 'bleu'"):
        Row("m", "auto", {}, "text", DECODING, 1, 1, 16, metrics={"bleu": Estimate(1)})
    with pytest.raises(ValueError, match="regime 'prefill'"):
        Row("m", "auto", {}, "text", "prefill", 1, 1, 16)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(Results((FULL, REFUSED)))
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("recall, 1024 tokens, 4 sequences")
    assert lines[1].split() == ["format", "pages", "bits", "KL", "perplexity", "right,", "%"]
    assert lines[2].split() == ["squat2:r=8", "2.91", "3.25", "0.10", "[0.05,", "0.20]", "12.3", "75", "[50,", "100]"]
    assert lines[3].split() == ["innerq2", "-", "-", "-", "-", "-"]
    assert "innerq2: no room for its sinks" in printed
    assert "lower bound" in printed


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    claim = Claim("squat2:r=8", "fp8", FULL.regime, FULL.task, FULL.context, "kl", 8, 0.5, 0.001, 0.05, 0.4, 0.6)
    report.write_csv(path, Results((FULL, REFUSED), (claim,)))
    with path.open() as file:
        full, refused = csv.DictReader(file)
    assert (full["label"], full["bits"], full["kl"], full["kl_low"], full["kl_high"]) == (
        "squat2:r=8", "3.25", "0.1", "0.05", "0.2",
    )  # fmt: skip
    assert (full["perplexity"], full["perplexity_low"], full["exact"]) == ("12.3456", "", "")
    assert (full["claim_kl_value"], full["claim_kl_verdict"], refused["claim_kl_value"]) == ("0.5", "better", "")
    assert (refused["problem"], refused["kl"]) == ("no room for its sinks", "")


def test_json_has_no_nan(tmp_path: Path) -> None:
    assert "NaN" not in json.dumps(FULL.document(), allow_nan=False)


def test_an_interval_without_an_end_is_saved(tmp_path: Path) -> None:
    """At levels that can't be reached with few texts: JSON has no infinity, either."""
    claim = Claim("squat2", "fp8", FULL.regime, FULL.task, FULL.context, "kl", 6, 0.5, 0.2, 0.001, 0.0, math.inf)
    Results((FULL,), (claim,)).save(tmp_path / "results.json")
    (found,) = Results.load(tmp_path / "results.json").claims
    assert (found.value, found.low, found.verdict) == (0.5, 0.0, None)


def test_a_rows_claims_are_those_of_its_table() -> None:
    mine, other = (Claim("squat2:r=8", "fp8", FULL.regime, FULL.task, n, "kl", 8, 0.5, 0.2) for n in (1024, 2048))
    assert report.claims_of(FULL, (other, mine, other)) == [mine]

"""`python -m proof contexts`: what it asks, a run with a short context, and that one wrong page in thirty is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import LOST, one_page_lost

from proof.contexts import main
from proof.contexts.cases import ANSWER, LENGTHS, LONG_ANSWER, SHORT, cases
from proof.fuzz.attempt import Runner
from proof.fuzz.case import LONG_MODEL, MODEL, Case
from vllm_kvq.bench.models.random_model import random_model

pytestmark = pytest.mark.engine
N = 64


def test_what_is_asked() -> None:
    listed = dict(cases("kitty2", N, LENGTHS))
    assert [*listed] == [f"kitty2 {length}" for length in LENGTHS]
    assert [case.setup.far for case in listed.values()] == [bool(case.setup.drafts) for case in listed.values()]
    assert {case.setup.far for case in listed.values()} == {True, False}
    for length, case in zip(LENGTHS, listed.values(), strict=True):
        assert case == Case.from_json(json.loads(json.dumps(case.to_json())))
        assert case.setup.llama["max_position"] >= length
        asked = {r.name: r for trace in case.traces for r in trace.requests}
        whole = asked["long"]
        assert len(whole.prompt) + whole.max_tokens == length
        assert asked["again"].prompt == whole.prompt
        shared = 3 * length // 4
        assert asked["other"].prompt[:shared] == whole.prompt[:shared]
        assert asked["other"].prompt[shared] != whole.prompt[shared]
        assert (len(asked["short"].prompt), asked["short"].max_tokens) == (SHORT, LONG_ANSWER)
        assert LONG_ANSWER > 5 * N, "pages are packed by decode steps"


@pytest.mark.parametrize("wrong", ["", "8k", "1024", "8192,1"])
def test_lengths_that_are_none(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main.main(["--context", wrong])
    assert exited.value.code == 2
    assert "is not a list of lengths from 2048 on" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "contexts.md"
    assert main.main(["--formats", "kitty2", "--context", "2048", "--report", str(page)]) == 0
    columns, found, total, minutes = (line.split() for line in capsys.readouterr().out.splitlines()[-4:])
    assert minutes[1:] == ["minutes"]
    assert total[0] == "total"
    counts = dict(zip(columns, map(int, found[2:]), strict=True))
    assert (counts["requests"], counts["hits"], counts["mismatches"]) == (4, 2, 0)
    assert counts["tokens"] == 3 * ANSWER + LONG_ANSWER
    assert "--formats kitty2 --context 2048" in page.read_text()


def test_one_wrong_page_of_thirty_is_found(tmp_path: Path) -> None:
    ((_, case),) = cases("kitty2", N, (2048,))
    assert LOST < 2048 // N < 2 * LOST
    runner = Runner(str(random_model(tmp_path / "model", **LONG_MODEL)), case.setup, one_page_lost)
    try:
        assert runner.judge(case.traces).mismatches
    finally:
        runner.close()


def test_long_contexts_have_a_model_of_their_own() -> None:
    assert LONG_MODEL.items() > MODEL.items()

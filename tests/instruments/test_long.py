"""`python -m proof long`: its prompts, and that it notices a token that differs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proof.long import main
from proof.long.prompts import AT_ONCE, SHORTEST, traces_of
from proof.oracle.engines.forked import EngineFailed
from proof.oracle.trace import Result, Trace
from vllm_kvq.eval.demo import demo_model
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.tasks.texts import LENGTHS


class Words:
    """In place of real texts, which take a while to read: all differ, and there are two dozen of each length."""

    def __init__(self, *_: object) -> None:
        pass

    def text(self, number: int, tokens: int) -> Any:
        pool = next(n for n in LENGTHS if n >= tokens)
        if number >= 24:
            raise ValueError(f"what is installed has not enough texts of {pool} tokens")
        rng = random.Random(pool + number)
        return SimpleNamespace(tokens=tuple(rng.randrange(2000) for _ in range(tokens)))


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(main, "Texts", Words)
    return Words()


def test_prompts(texts: Any) -> None:
    """Lengths are spread, nothing is asked twice, and the third of a trace begins like the first."""
    traces = traces_of(texts, 14, 8, 0)
    requests = [r for trace in traces for r in trace.requests]
    assert [r.name for r in requests] == [str(i) for i in range(14)]
    lengths = sorted(len(r.prompt) for r in requests)
    assert SHORTEST <= lengths[0] < 1800
    assert 5000 < lengths[-1] <= 8192
    assert len({r.prompt for r in requests}) == 14
    for trace in traces:
        first, *others = trace.requests
        half = first.prompt[: len(first.prompt) // 2]
        assert [r.prompt[: len(half)] == half for r in others] == [False, True][: len(others)]
        assert all(r.arrival > 0 for r in others[1:])
    assert traces == traces_of(texts, 14, 8, 0)
    assert traces != traces_of(texts, 14, 8, 1)


def answered(traces: Sequence[Trace]) -> list[Result]:
    return [Result({r.name: [[1] * r.max_tokens] for r in trace.requests}, {}, [], 0, (9, 9)) for trace in traces]


@pytest.mark.parametrize("wrong", ["nothing", "a token", "a block"])
def test_what_differs_is_found(
    wrong: str, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(model: Model, name: str, traces: Sequence[Trace]) -> list[Result]:
        found = answered(traces)
        if name == "lossless" and wrong == "a token":
            found[1].outputs[str(AT_ONCE)][0][5] = 2
        if name == "lossless" and wrong == "a block":
            found[0] = replace(found[0], free_blocks=(9, 8))
        return found

    monkeypatch.setattr(main, "answers", answers)
    report = tmp_path / "page.md"
    status = main.main([str(demo_model()), "--prompts", "5", "--tokens", "8", "--report", str(report)])
    said = {"nothing": "0 mismatches", "a token": f"{AT_ONCE}[0]: token 5 of 8", "a block": "1 blocks were not freed"}
    assert status == (wrong != "nothing")
    assert said[wrong] in capsys.readouterr().out
    assert said[wrong] in report.read_text()
    assert "python -m proof long .weights/" in report.read_text()


def test_more_prompts_than_there_are_texts(texts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main([str(demo_model()), "--prompts", "5000"])
    assert stopped.value.code == 2
    assert "what is installed has not enough" in capsys.readouterr().err


def test_fifty_prompts_need_no_more_than_there_are_of_a_length(texts: Any) -> None:
    """Real texts of up to 8,192 tokens are the fewest."""
    assert sum(len(trace.requests) for trace in traces_of(texts, 50, 8, 0)) == 50


def test_an_engine_that_fails(texts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any) -> list[Result]:
        raise EngineFailed("no room")

    monkeypatch.setattr(main, "answers", fails)
    assert main.main([str(demo_model()), "--prompts", "1"]) == 1
    assert "an engine failed\nno room" in capsys.readouterr().err


def test_a_model_without_room_for_long_prompts() -> None:
    with pytest.raises(ValueError, match="prompts of 1,024 to 2,000 tokens are not long"):
        traces_of(Words(), 3, 8, 0, 2000)  # type: ignore[arg-type]

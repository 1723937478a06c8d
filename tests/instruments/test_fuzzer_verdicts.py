"""The fuzzer reports what it finds: made-up findings, no engine. For each there is also a healthy run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proof.fuzz import attempt, main, session
from proof.fuzz.case import Case, Setup
from proof.fuzz.draw import MOST
from proof.fuzz.session import Finding, Session, minimal
from proof.oracle.engines.forked import EngineFailed
from proof.oracle.trace import Request, Result, Trace
from proof.oracle.verdict import Verdict
from vllm_kvq.kernels.cpu.processor import processor_name

TRACE = Trace((Request("good", (10, 11), 3), Request("short", (12,), 3, abort_after=1)), reset=True)
ANSWER = Result({"good": [[1, 2, 3]], "short": [[4, 5]]}, {"good": 0}, [], 0, (9, 9))
CASE = Case(Setup("squat2"), (TRACE,))


# -- the fuzzer's command ---------------------------------------------------------------------------------------------
@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., tuple[int, dict[str, Any]]]]:
    """fuzz(what the session finds, ...) -> exit status and report."""
    for name in ("OMP_NUM_THREADS", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "1" if name.startswith("OMP") else "ignore")
    monkeypatch.setattr("vllm_kvq.bench.models.random_model.random_model", lambda path, **_: path)
    monkeypatch.setattr("vllm_kvq.kernels.cpu.library.library", lambda: None)
    threads = torch.get_num_threads()

    def run(finding: Finding | None, *arguments: str) -> tuple[int, dict[str, Any]]:
        class Found(Session):
            def run(self) -> None:
                self.finding = finding
                self.counts["squat2"].verdict.add(Verdict(requests=5, tokens=70, ties=1))
                if finding is not None:
                    self.counts["squat2"].verdict.mismatches += finding.messages

        monkeypatch.setattr(session, "Session", Found)
        monkeypatch.setattr(session, "minimal", lambda model, found, seconds: (found.case, found.messages))
        report = tmp_path / "report.json"
        status = main.main(["--formats", "squat2", "--counts", str(report), *arguments])
        return status, json.loads(report.read_text())

    yield run
    torch.set_num_threads(threads)


def test_the_fuzzer_that_finds_nothing(
    fuzz: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = fuzz(None)
    assert status == 0
    assert (
        report["counts"]["total"] | {"requests": 5, "tokens": 70, "ties": 1, "mismatches": 0}
        == report["counts"]["total"]
    )
    assert "case" not in report
    assert "MISMATCH" not in capsys.readouterr().out


def test_the_fuzzer_that_finds_something(
    fuzz: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = fuzz(Finding(CASE, CASE, ["good[0]: token 1"]), "--seed", "7")
    assert status == 1
    assert report["counts"]["total"]["mismatches"] == 1
    assert Case.from_json(report["case"]) == CASE
    printed = capsys.readouterr().out.splitlines()
    assert "MISMATCH (seed 7): good[0]: token 1" in printed
    # the last line is the case, which --replay reads
    assert Case.from_json(json.loads(printed[-1])) == CASE


def test_a_page_for_the_results(fuzz: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path) -> None:
    page = tmp_path / "fuzz.md"
    assert fuzz(None, "--seed", "7", "--requests", "5", "--report", str(page))[0] == 0
    text = page.read_text()
    assert "5 requests, 70 tokens of random traces" in text
    assert "Mismatches: 0." in text
    assert processor_name() in text
    assert "    python -m proof fuzz --seed 7 --requests 5 --formats squat2\n" in text
    assert re.search(r"^    total .* 5 +70 .* 1 +0$", text, re.MULTILINE)
    assert fuzz(Finding(CASE, CASE, ["good[0]: token 1"]), "--report", str(page))[0] == 1
    assert "Mismatches: 1." in page.read_text()


@pytest.mark.parametrize(
    "wrong", [["--requests", "0"], ["--requests", "5", "--minutes", "1"], ["--report", "a", "--replay", "b"]]
)
def test_lengths_that_are_none(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(wrong)
    assert stop.value.code == 2


@pytest.mark.parametrize("mismatches", [[], ["good[0]: token 1"]], ids=["healthy", "planted"])
def test_replay(mismatches: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[bool] = []
    runners = SimpleNamespace(
        judge=lambda case: Verdict(requests=2, mismatches=[*mismatches]), close=lambda: closed.append(True)
    )
    monkeypatch.setattr(attempt, "Runners", lambda model: runners)
    assert main.replay("model", CASE) == len(mismatches)
    assert capsys.readouterr().out.splitlines() == ["requests=2", mismatches[0] if mismatches else "no mismatch"]
    assert closed


# -- its session ------------------------------------------------------------------------------------------------------
class FakeRunner:
    """What a configuration's engine and judge say about any trace."""

    verdict: Callable[[], Verdict] = Verdict
    plain: Callable[[], Verdict] = Verdict
    closed = 0

    def __init__(self, model: str, setup: Setup, prepare: object) -> None:
        self.setup = setup

    def run(self, traces: Sequence[Trace]) -> tuple[list[Result], Verdict]:
        verdict = type(self).verdict()
        verdict.requests = sum(len(t.requests) for t in traces)
        return [ANSWER] * len(traces), verdict

    def against_plain(self, traces: Sequence[Trace], results: Sequence[Result]) -> Verdict:
        assert self.setup.format == "lossless"
        assert len(traces) == len(results) > 0
        return type(self).plain()

    def close(self) -> None:
        type(self).closed += 1


def ran(monkeypatch: pytest.MonkeyPatch, formats: Sequence[str], **plants: Callable[[], Verdict]) -> Session:
    """A session without time: every format runs one trace."""
    fake = type("Planted", (FakeRunner,), {name: staticmethod(f) for name, f in plants.items()})
    monkeypatch.setattr(session, "Runner", fake)
    made = Session("model", 1, 0.0, formats, jobs=2)
    made.run()
    assert fake.closed >= 1
    return made


def wrong() -> Verdict:
    return Verdict(mismatches=["good[0]: token 1"])


def test_a_healthy_session(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran(monkeypatch, ["squat2", "lossless"])
    assert made.finding is None
    for count in made.counts.values():
        assert (count.engines, count.traces) == (1, 1)
        assert count.verdict.requests > 0
        assert not count.verdict.mismatches


@pytest.mark.parametrize("wanted", [1, 400])
def test_a_session_of_so_many_requests(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session continues past its time, and over more than one engine of a format."""
    monkeypatch.setattr(session, "Runner", type("Planted", (FakeRunner,), {}))
    monkeypatch.setattr(session, "ROUND_SECONDS", 0.001)
    made = Session("model", 1, 0.0, ["squat2", "qjl3"], jobs=2, requests=wanted)
    made.run()
    assert made.judged >= wanted
    assert made.judged < wanted + 2 * session.EPISODE * MOST + 1
    assert all(count.engines for count in made.counts.values())
    assert max(count.engines for count in made.counts.values()) > 1 or wanted == 1


@pytest.mark.parametrize(
    ("formats", "where"), [(["squat2"], "verdict"), (["lossless"], "verdict"), (["lossless"], "plain")]
)
def test_a_session_with_a_mismatch(formats: list[str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran(monkeypatch, formats, **{where: wrong})
    assert made.finding is not None
    assert made.finding.messages == ["good[0]: token 1"]
    assert made.finding.case.traces
    assert made.counts[formats[0]].verdict.mismatches == made.finding.messages


def test_a_session_whose_judge_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Verdict:
        raise RuntimeError("no reference")

    with pytest.raises(RuntimeError, match="no reference"):
        ran(monkeypatch, ["squat2"], verdict=broken)


def test_the_smallest_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any trace that contains the request `bad` is wrong."""

    class Runners:
        def __init__(self, *_: object) -> None:
            pass

        def judge(self, case: Case, fresh: bool = False) -> Verdict:
            bad = any(r.name == "bad" for t in case.traces for r in t.requests)
            return wrong() if bad else Verdict()

        def close(self) -> None:
            pass

    monkeypatch.setattr(session, "Runners", Runners)
    requests = [Request(f"r{i}", (10,) * 40, 20, i) for i in range(9)] + [Request("bad", (11,) * 40, 20, 9)]
    case = Case(Setup("squat2", drafts=2, budget=64), (Trace(tuple(requests), True),))
    small, messages = minimal("model", Finding(case, case, ["first"]), 60)
    assert messages == ["good[0]: token 1"]
    assert [r.name for t in small.traces for r in t.requests] == ["bad"]
    assert small.size[1] < 10
    assert small.setup == Setup("squat2")
    # nothing can be said about one that does not fail again
    healthy = Case(Setup("squat2"), (Trace((Request("r", (10,), 3),), True),))
    assert minimal("model", Finding(healthy, case, ["once"]), 60)[1] == ["good[0]: token 1"]
    assert minimal("model", Finding(healthy, healthy, ["once"]), 60) == (healthy, ["once"])


# -- one configuration ------------------------------------------------------------------------------------------------
def runner(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Result | Exception], format_name: str = "lossless"
) -> attempt.Runner:
    """Engines that answer like this, by format; the reference finds nothing, and treats tokens from 100 on as near."""
    monkeypatch.setattr(attempt, "ReplayModel", lambda *_, **__: None)
    monkeypatch.setattr(attempt, "judge", lambda *_: Verdict(requests=2))
    near = lambda _model, _traces, _results, found: 0.0 if min(found.tokens) >= 100 else 30.0  # noqa: E731
    monkeypatch.setattr(attempt, "distance", near)
    made = attempt.Runner("model", Setup(format_name))

    class Engine:
        def __init__(self, name: str) -> None:
            self.answer = answers[name]

        def run(self, _: Trace) -> Result:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        def close(self) -> None:
            pass

    monkeypatch.setattr(made, "engine", Engine)
    return made


OTHER = replace(ANSWER, outputs=ANSWER.outputs | {"good": [[1, 9, 3]]})
NEAR = replace(ANSWER, outputs=ANSWER.outputs | {"good": [[1, 101, 3]]})
FAR = replace(ANSWER, outputs=ANSWER.outputs | {"good": [[1, 100, 3]]})


@pytest.mark.parametrize(
    ("ours", "plain", "complaint", "ties"),
    [
        (ANSWER, ANSWER, None, 0),
        (ANSWER, OTHER, "good[0]: token 1 of 3; plain vLLM and lossless: (9, 2)", 0),
        (NEAR, FAR, None, 1),
        (replace(ANSWER, free_blocks=(9, 7)), ANSWER, "2 blocks were not freed", 0),
        (EngineFailed("no answer within 300 seconds"), ANSWER, "the engine failed: no answer within 300 seconds", 0),
    ],
    ids=["healthy", "another token", "tie", "leak", "engine"],
)
def test_one_configuration(
    ours: Result | Exception, plain: Result, complaint: str | None, ties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = runner(monkeypatch, {"lossless": ours, "auto": plain}).judge([TRACE])
    assert verdict.mismatches == ([] if complaint is None else [complaint])
    assert verdict.ties == ties

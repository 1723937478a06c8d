"""The fuzzer and the oracle say what they find: findings made up here, no engine. Beside each stands a healthy run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proof.fuzz import attempt, main, session
from proof.fuzz.case import Case, Setup
from proof.fuzz.session import Finding, Session, minimal
from proof.oracle import judge as judging
from proof.oracle.compare import Difference, compare, compare_all, differences
from proof.oracle.forked import EngineFailed
from proof.oracle.judge import MANY, judge
from proof.oracle.replay import ReplayModel
from proof.oracle.trace import Chunk, Request, Result, Trace
from proof.oracle.verdict import Verdict, leaks
from vllm_kvq.bench.random_model import random_model
from vllm_kvq.formats import Geometry, get_format

TRACE = Trace((Request("good", (10, 11), 3), Request("short", (12,), 3, abort_after=1)), reset=True)
ANSWER = Result({"good": [[1, 2, 3]], "short": [[4, 5]]}, {"good": 0}, [], 0, (9, 9))
CASE = Case(Setup("squat2"), (TRACE,))


# -- the fuzzer's command ---------------------------------------------------------------------------------------------
@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., tuple[int, dict[str, Any]]]]:
    """fuzz(what the session finds, ...) -> exit status and report."""
    for name in ("OMP_NUM_THREADS", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "1" if name.startswith("OMP") else "ignore")
    monkeypatch.setattr("vllm_kvq.bench.random_model.random_model", lambda path, **_: path)
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
        status = main.main(["--format", "squat2", "--json", str(report), *arguments])
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
    """What a configuration's engine and judge say of any trace."""

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
    """Whatever holds the request `bad` is wrong."""

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
    # nothing can be said of one that does not fail again
    healthy = Case(Setup("squat2"), (Trace((Request("r", (10,), 3),), True),))
    assert minimal("model", Finding(healthy, case, ["once"]), 60)[1] == ["good[0]: token 1"]
    assert minimal("model", Finding(healthy, healthy, ["once"]), 60) == (healthy, ["once"])


# -- one configuration ------------------------------------------------------------------------------------------------
def runner(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Result | Exception], format_name: str = "lossless"
) -> attempt.Runner:
    """Engines that answer so, by format; the reference finds nothing, and takes tokens from 100 on for near."""
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


# -- two answers ------------------------------------------------------------------------------------------------------
def answered(good: list[list[int]] | None = None, short: list[list[int]] | None = None) -> Result:
    return replace(ANSWER, outputs={"good": good or [[1, 2, 3]], "short": short or [[4, 5]]})


@pytest.mark.parametrize(
    ("got", "found"),
    [
        (answered(), []),
        (answered([[1, 2, 4]]), [Difference("good", 0, 2, 3, (3, 4))]),
        (answered([[7, 2, 3]]), [Difference("good", 0, 0, 3, (1, 7))]),
        (answered([[1, 2]]), [Difference("good", 0, 2, 3, (3, None))]),
        (answered([[1, 2, 3, 4]]), [Difference("good", 0, 3, 4, (None, 4))]),
        (answered([[]]), [Difference("good", 0, 0, 3, (1, None))]),
        # an aborted request may end sooner or later, in the same tokens
        (answered(short=[[4]]), []),
        (answered(short=[[4, 5, 6]]), []),
        (answered(short=[[4, 6]]), [Difference("short", 0, 1, 2, (5, 6))]),
    ],
)
def test_differences(got: Result, found: list[Difference]) -> None:
    assert differences(TRACE, ANSWER, got) == found
    verdict = compare(TRACE, ANSWER, got)
    assert verdict.mismatches == [str(f) for f in found]
    assert verdict.requests == 2
    twice = compare_all([TRACE, TRACE], [ANSWER, ANSWER], [ANSWER, got])
    assert (len(twice.mismatches), twice.requests) == (len(found), 4)


def test_differences_of_a_later_sample() -> None:
    trace = Trace((Request("many", (10,), 2, n=3, temperature=0.01),))
    one, two = (Result({"many": [[1, 2], [3, 4], [5, last]]}, {}, [], 0, (9, 9)) for last in (6, 7))
    assert differences(trace, one, one) == []
    assert differences(trace, one, two) == [Difference("many", 2, 1, 2, (6, 7))]


@pytest.mark.parametrize(("free", "found"), [((9, 9), []), ((9, 8), ["1 blocks were not freed"]), ((0, 0), [])])
def test_leaks(free: tuple[int, int], found: list[str]) -> None:
    result = replace(ANSWER, free_blocks=free)
    assert leaks(result) == found
    assert compare(TRACE, ANSWER, result).mismatches == found


def test_blocks_that_are_freed_twice_are_found() -> None:
    assert leaks(replace(ANSWER, free_blocks=(8, 9)))


def test_verdicts_add_up() -> None:
    total = Verdict(requests=1, ties=2, mismatches=["a"])
    total.add(Verdict(requests=3, ties=4, stops=5, mismatches=["b"]))
    assert total == Verdict(requests=4, ties=6, stops=5, mismatches=["a", "b"])


# -- the reference's judgement ----------------------------------------------------------------------------------------
class Gaps:
    """In the place of the reference: by how much it prefers another token, at each position and in each replay."""

    def __init__(self, gap: Callable[[int, int], float]) -> None:
        self.formats = [get_format("squat2").bind(Geometry(64, 64, torch.float32))]
        self.gap, self.replay, self.noise, self.exact = gap, 0, None, None
        """`replay` 0 is the one without noise."""

    def perturb(self, seed: int) -> None:
        self.replay = seed + 1

    def behind(self, _model: object, _lives: object, choices: Sequence[judging.Choice]) -> list[float]:
        return [self.gap(c.position, self.replay) for c in choices]


def judged(
    monkeypatch: pytest.MonkeyPatch, gap: Callable[[int, int], float], prompt: int = 40, **plant: Any
) -> Verdict:
    """An answer of three tokens, at positions 40 to 42 after a prompt of 40."""
    model: Any = Gaps(gap)
    monkeypatch.setattr(judging, "_behind", model.behind)
    steps = [
        [Chunk("r-0", 0, 40, pages=[1], admitted=True)],
        [Chunk("r-0", 40, 1, pages=[1])],
        [Chunk("r-0", 41, 1, pages=[1])],
    ]
    result = replace(Result({"r": [[7, 8, 9]]}, {}, steps, 0, (9, 9)), **plant)
    return judge(model, [Trace((Request("r", tuple(range(10, 10 + prompt)), 3),))], [result])


def noisy(seed: int, spread: float) -> float:
    return spread * random.Random(seed).gauss(0, 1)


@pytest.mark.parametrize(
    ("gap", "mismatches", "ties"),
    [
        (lambda position, replay: -1.0, [], 0),
        (lambda position, replay: 0.0, [], 0),
        (lambda position, replay: 5.0 if position == 41 else -1.0, ["r[0]: position 41"], 0),
        (lambda position, replay: 5.0 if position == 42 else -1.0, ["r[0]: position 42"], 0),
        # far away, however the replays are disturbed
        (lambda position, replay: 5.0 + noisy(replay, 0.1) if position == 40 else -1.0, ["r[0]: position 40"], 0),
        # one of the replays makes this choice
        (lambda position, replay: (-0.1 if replay == MANY else 5.0) if position == 40 else -1.0, [], 1),
        (lambda position, replay: -0.1 if replay == 1 else 5.0, [], 3),
        # it comes nearer than the distance varies
        (lambda position, replay: (8.0 if replay % 2 else 0.1) if position == 42 else -1.0, [], 1),
    ],
    ids=["healthy", "no gap", "second token", "last token", "first token", "late tie", "all ties", "two values"],
)
def test_judge(
    gap: Callable[[int, int], float], mismatches: list[str], ties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = judged(monkeypatch, gap)
    assert (verdict.mismatches, verdict.ties) == (mismatches, ties)
    assert (verdict.requests, verdict.tokens) == (1, 3)


def test_mismatches_beyond_those_tried_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "AT_ONCE", 1)
    assert judged(monkeypatch, lambda position, replay: 5.0).mismatches == [
        "r[0]: position 40",
        "2 more tokens that the reference would not choose, not tried again",
    ]


@pytest.mark.parametrize(
    ("prompt", "steps", "problem"),
    [
        (140, [[Chunk("r-0", 96, 44, pages=[3, 4, 5], admitted=True)]], "hit a page that was never written"),
        (
            40,
            [[Chunk("r-0", 0, 40, pages=[1], admitted=True)], [Chunk("r-0", 42, 1, pages=[1])]],
            "42 tokens are computed after 40 to 40",
        ),
    ],
    ids=["a page of nobody", "a token left out"],
)
def test_a_history_that_can_not_be(
    prompt: int, steps: list[list[Chunk]], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the reference agrees with every token."""
    verdict = judged(monkeypatch, lambda position, replay: -1.0, prompt, steps=steps)
    assert len(verdict.mismatches) == 1
    assert problem in verdict.mismatches[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = random_model(
        tmp_path_factory.mktemp("model") / "random", hidden=128, layers=2, heads=4, kv_heads=2, vocab=512
    )
    yield ReplayModel(str(path), "squat2", 64, W=0)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_wrong_token_is_found_by_the_reference(reference: ReplayModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It agrees with its own answer, and with no other token."""
    monkeypatch.setattr(judging, "MANY", 30)  # replays, to be done sooner
    prompt, answer, replay = [random.Random(3).randrange(10, 500) for _ in range(70)], [], reference.request()
    logits = replay.step(prompt)
    for _ in range(6):
        answer.append(int(logits[-1].argmax()))
        logits = replay.step(answer[-1:])
    trace = Trace((Request("r", tuple(prompt), 6),))

    def verdict(tokens: list[int]) -> Verdict:
        chunks = [Chunk("r-0", 0, 70, pages=[1, 2], admitted=True)]
        chunks += [Chunk("r-0", 70 + i, 1, pages=[1, 2]) for i in range(5)]
        return judge(reference, [trace], [Result({"r": [tokens]}, {}, [[c] for c in chunks], 0, (9, 9))])

    healthy = verdict(answer)
    assert (healthy.mismatches, healthy.tokens, healthy.ties) == ([], 6, 0)
    planted = [*answer[:4], answer[4] % 400 + 11, answer[5]]
    assert verdict(planted).mismatches[0] == "r[0]: position 74"

"""The oracle reports what it finds: made-up findings, no engine. For each there is also a healthy run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from proof.fuzz.case import Case, Setup
from proof.oracle import judge as judging
from proof.oracle.compare import Difference, compare, compare_all, differences
from proof.oracle.judge import MANY, judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.structured import Vocabulary
from proof.oracle.trace import Chunk, Request, Result, Trace
from proof.oracle.verdict import Verdict, leaks
from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.formats import Geometry, get_format

TRACE = Trace((Request("good", (10, 11), 3), Request("short", (12,), 3, abort_after=1)), reset=True)
ANSWER = Result({"good": [[1, 2, 3]], "short": [[4, 5]]}, {"good": 0}, [], 0, (9, 9))
CASE = Case(Setup("squat2"), (TRACE,))


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
        # an aborted request may stop sooner or later, with the same tokens
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
    """Stands in for the reference: by how much it prefers another token, at each position and in each replay."""

    def __init__(self, gap: Callable[[int, int], float]) -> None:
        self.formats = [get_format("squat2").bind(Geometry(64, 64, torch.float32))]
        self.vocabulary = Vocabulary("", 512)
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
    ("tie", "mismatches", "ties"),
    [
        (40, ["s[0]: position 51"], 1),
        # what follows a mismatch is not tried
        (51, ["r[0]: position 40", "s[0]: position 51"], 0),
    ],
    ids=["the first is a tie", "the second would be one"],
)
def test_each_request_is_tried(tie: int, mismatches: list[str], ties: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests, with prompts of 40 and 50 tokens, each with a wrong token that the first replays don't explain."""
    wrong = {40: lambda replay: 5.0, 51: lambda replay: 5.0} | {tie: lambda replay: 8.0 if replay % 2 else 0.1}
    model: Any = Gaps(lambda position, replay: wrong[position](replay) if position in wrong else -1.0)
    monkeypatch.setattr(judging, "_behind", model.behind)
    prompts = {"r": 40, "s": 50}
    chunks = {name: [Chunk(f"{name}-0", 0, n, pages=[n], admitted=True)] for name, n in prompts.items()}
    for name, n in prompts.items():
        chunks[name] += [Chunk(f"{name}-0", n + i, 1, pages=[n]) for i in range(2)]
    outputs = {name: [[7, 8, 9]] for name in prompts}
    result = Result(outputs, {}, [list(step) for step in zip(*chunks.values(), strict=True)], 0, (9, 9))
    trace = Trace(tuple(Request(name, tuple(range(10, 10 + n)), 3) for name, n in prompts.items()))
    verdict = judge(model, [trace], [result])
    assert (verdict.mismatches, verdict.ties) == (mismatches, ties)


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
    monkeypatch.setattr(judging, "MANY", 30)  # fewer replays, to finish sooner
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

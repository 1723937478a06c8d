"""What a run asks of made-up engines: a run that was stopped resumes, a refused format is a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_on_disk import TINY, Written
from plans import evaluate, plan

from vllm_kvq.eval.engine.engines import EngineFailed
from vllm_kvq.eval.engine.jobs import EngineArguments, Generate, Score, Started
from vllm_kvq.eval.engine.logprobs import Logprobs
from vllm_kvq.eval.results import report
from vllm_kvq.eval.results.result import DECODING, TEACHER_FORCED, Estimate, Results
from vllm_kvq.eval.run import harness
from vllm_kvq.eval.run.plan import LEAD, REQUESTS
from vllm_kvq.eval.run.rows import rows
from vllm_kvq.eval.run.store import Store

SHAPE = TINY
VOCABULARY = 512


class MadeUp:
    """Distributions that depend only on the tokens and the format."""

    asked: list[tuple[str, str]]
    refused: tuple[str, ...] = ()

    def __init__(self, arguments: EngineArguments) -> None:
        self.format = arguments.format
        self.asked.append((self.format, "start"))
        if self.format in self.refused:
            raise EngineFailed("it has sinks")
        self.started = Started(dict.fromkeys(arguments.lengths, 3.0))

    def score(self, job: Score) -> Logprobs:
        self.asked.append((self.format, "score"))
        return self.made_up(job.tokens[1:], job.tokens)

    def generate(self, job: Generate) -> list[Logprobs]:
        given = all(len(forced) == count for forced, count in zip(job.forced, job.counts, strict=True))
        self.asked.append((self.format, "force" if given else "generate"))
        said = [(*forced, *[7] * (count - len(forced))) for forced, count in zip(job.forced, job.counts, strict=True)]
        return [self.made_up(tokens, prompt) for tokens, prompt in zip(said, job.prompts, strict=True)]

    def made_up(self, tokens: tuple[int, ...], seed: tuple[int, ...]) -> Logprobs:
        rng = np.random.default_rng([len(seed), *seed[:8]])
        logits = rng.normal(size=(len(tokens), VOCABULARY))
        if self.format != "auto":
            logits += 0.1 * np.random.default_rng(1).normal(size=logits.shape)
        values = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
        token = np.array(tokens, np.int32)
        return Logprobs(token, values[np.arange(len(token)), token], values)

    def __enter__(self) -> MadeUp:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    class Fresh(MadeUp):
        asked: list[tuple[str, str]] = []

    monkeypatch.setattr(harness, "Engine", Fresh)
    return Fresh.asked


def refuse(name: str) -> None:
    harness.Engine.refused = (name,)  # type: ignore[attr-defined]


def test_a_run_that_was_stopped_goes_on(model: Path, tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    todo = plan(model, "squat2,kivi2")
    whole = evaluate(tmp_path / "whole", todo)
    all_jobs = [job for job in asked if job[1] != "start"]
    for stop in (1, 17):
        asked.clear()
        figures = 0

        def count(text: str, more: int, stop: int = stop) -> None:
            nonlocal figures
            figures += more
            if figures == stop and more:
                raise KeyboardInterrupt

        folder = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            harness.Run(todo, Store(folder), count).go()
        assert evaluate(folder, todo) == whole
        jobs = [job for job in asked if job[1] != "start"]
        # one job at most is done twice: the one whose answer was not saved yet
        assert len(all_jobs) <= len(jobs) <= len(all_jobs) + 1
    asked.clear()
    assert evaluate(tmp_path / "whole", todo) == whole
    assert asked == []


def test_a_format_that_is_added_costs_only_itself(model: Path, tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    evaluate(tmp_path, plan(model, "squat2", regimes=(DECODING,)))
    asked.clear()
    evaluate(tmp_path, plan(model, "squat2,kivi2", regimes=(DECODING,)))
    # plain says its own continuations once more, for kivi2 to follow, and then kivi2's
    jobs = {("kivi2", "generate"), ("kivi2", "force"), ("auto", "force")}
    assert {job for job in asked if job[1] != "start"} == jobs


def test_a_format_also_follows_what_plain_has_said(
    model: Path, tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tasks that ask nothing; `kl` is of the format's own tokens, `kl_forced` of plain's."""

    class Saying(harness.Engine):  # type: ignore[misc, valid-type]
        followed: list[tuple[int, ...]] = []

        def generate(self, job: Generate) -> list[Logprobs]:
            token = 7 if self.format == "auto" else 9
            said = []
            for forced, count, prompt in zip(job.forced, job.counts, job.prompts, strict=True):
                if self.format != "auto" and len(forced) == count:
                    self.followed.append(forced)
                tokens = (*forced, *[token] * (count - len(forced)))
                # on plain's tokens the format is more wrong the later they come
                made = self.made_up(tokens, prompt)
                if self.format != "auto" and len(forced) == count:
                    noise = np.random.default_rng(2).normal(size=made.values.shape)
                    logits = made.values + np.linspace(0, 1, count)[:, None] * noise
                    values = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
                    made = Logprobs(made.token, values[np.arange(count), made.token], values)
                said.append(made)
            return said

    monkeypatch.setattr(harness, "Engine", Saying)
    todo = plan(model, "squat2", regimes=(DECODING,), tasks=("recall", "text"))
    for _ in range(2):  # the second time from the cache
        found = {(r.format, r.task): r for r in evaluate(tmp_path, todo).rows}
        ours = found["squat2", "text"]
        assert ours.metrics["kl"].value == pytest.approx(0.005, rel=0.3)
        assert ours.metrics["kl_forced"].value > 0.1
        growing = [b.estimate.value for b in ours.by_position["kl_forced"]]
        assert growing == sorted(growing)
        assert growing[-1] > 3 * growing[0]
        assert ours.metrics["agreement"].value == 0
        assert "kl_forced" not in found["squat2", "recall"].metrics
        assert "kl_forced" not in found["auto", "text"].metrics
    texts = [item for item in todo.sequences if item.task == "text"]
    assert len(Saying.followed) == len(texts)
    for item, forced in zip(texts, Saying.followed, strict=True):
        assert {*forced[todo.leads(item)[0] :]} == {7}
    # a format that is added follows the same text
    Saying.followed.clear()
    evaluate(tmp_path, plan(model, "squat2,kivi2", regimes=(DECODING,), tasks=("recall", "text")))
    assert len(Saying.followed) == len(texts)
    assert all({*forced[-24:]} == {7} for forced in Saying.followed)
    report.show(evaluate(tmp_path, todo))


def test_answers_are_generated_together(model: Path, tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    """As many requests as an engine takes at once, of one text after the other, without mixing them up."""
    todo = plan(model, "squat2", regimes=(DECODING,), tasks=("text",), count=11)
    evaluate(tmp_path, todo)
    assert [job for job in asked if job == ("squat2", "generate")] == [("squat2", "generate")] * 2
    assert [len(batch) for batch in todo.batches(todo.sequences)] == [REQUESTS, 3]
    job = todo.generate_all(todo.sequences[:3])
    assert job.prompts == tuple(todo.generate(item).prompts[0] for item in todo.sequences[:3])


def test_nothing_large_is_left(model: Path, tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    evaluate(tmp_path, plan(model, "squat2"))
    assert not [*(tmp_path / "whole").iterdir()]


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"chunk": 64}, {"top": 8}, {"longest": 9}, {"answers": 1}, {"contexts": (192,)}],
    ids=lambda change: next(iter(change)),
)
def test_figures_belong_to_how_they_were_measured(
    model: Path, tmp_path: Path, asked: list[tuple[str, str]], change: dict[str, Any]
) -> None:
    first, other = plan(model, "squat2"), plan(model, "squat2", **change)
    keys = [{p.key(c, s, r) for c in p.choices for s in p.sequences for r in p.regimes} for p in (first, other)]
    regimes = 1 if set(change) & {"chunk", "longest", "answers"} else 0
    assert len(keys[0] & keys[1]) == regimes * len(keys[0]) // 2


def test_another_model_is_another_key(model: Path, written: Written) -> None:
    other = written(**TINY, seed=1)
    one, two = plan(model, "squat2"), plan(other, "squat2")
    assert one.digest != two.digest
    assert one.key(one.choices[0], one.sequences[0], DECODING) != two.key(two.choices[0], two.sequences[0], DECODING)


def test_a_refused_format_is_a_row_with_the_reason(
    model: Path, tmp_path: Path, asked: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    refuse("innerq2")
    results = evaluate(tmp_path, plan(model, "innerq2,squat2"))
    for row in results.rows:
        assert row.problem == ("it has sinks" if row.format == "innerq2" else None)
        assert bool(row.metrics) is (row.format != "innerq2")
    report.show(results)
    printed = capsys.readouterr().out
    assert printed.count("innerq2: it has sinks") == 1
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results


def test_without_the_plain_cache_there_is_nothing(model: Path, tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    refuse("auto")
    with pytest.raises(EngineFailed, match="it has sinks"):
        evaluate(tmp_path, plan(model, "squat2"))


def test_rows_say_what_was_measured(model: Path, tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    todo = plan(model, "squat2")
    made = harness.Run(todo, Store(tmp_path), lambda text, more: None)
    made.go()
    found = {(r.format, r.task, r.regime): r for r in rows(made)}
    plain, ours = (found[name, "recall", TEACHER_FORCED] for name in ("auto", "squat2"))
    assert plain.metrics["kl"] == Estimate(0, 0, 0)
    assert ours.metrics["kl"].value == pytest.approx(0.005, rel=0.3)  # 0.1 squared, halved
    assert ours.metrics["accuracy"].value == 0
    assert sum(b.count for b in ours.by_depth["accuracy"]) == sum(
        len(s.spans) for s in todo.sequences if s.task == "recall"
    )
    assert sum(b.count for b in ours.by_position["kl"]) == sum(
        len(s.tokens) - 1 for s in todo.sequences if s.task == "recall"
    )
    assert ours.hurt[0].kl >= ours.hurt[-1].kl > ours.metrics["kl_median"].value
    assert found["squat2", "all", TEACHER_FORCED].sequences == 2 * ours.sequences
    # all say 7: they agree, and are wrong
    generated = found["squat2", "recall", DECODING]
    assert generated.metrics["exact"].value == 0
    lengths = [n for s in todo.sequences if s.task == "recall" for n in todo.lengths(s)]
    assert generated.metrics["agreement"].value == pytest.approx(np.mean(lengths))


def test_the_tokens_before_an_answer_are_read_one_by_one(model: Path) -> None:
    todo = plan(model, "squat2", longest=3)
    for item in todo.sequences:
        job = todo.generate(item)
        for span, prompt, forced, count in zip(todo.asked(item), job.prompts, job.forced, job.counts, strict=True):
            assert (*prompt, *forced) == item.tokens[: span.begin]
            assert len(forced) == LEAD
            assert count == LEAD + min(3, span.end - span.begin)


def test_answers_are_where_their_spans_are(
    model: Path, tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that knows only the answers: all are right, and of two that it generates the first is exact."""
    todo = plan(model, "squat2", tasks=("recall", "variables"), contexts=(400,))
    known = {item.tokens: item for item in todo.sequences}

    class Knowing(harness.Engine):  # type: ignore[misc, valid-type]
        def score(self, job: Score) -> Logprobs:
            found, item = super().score(job), known[job.tokens]
            values = np.full_like(found.values, -20)
            values[:, 0] = -1e-6
            for span in item.spans:
                for at in range(span.begin, span.end):
                    values[at - 1, 0], values[at - 1, item.tokens[at]] = -20, -1e-6
            return Logprobs(found.token, found.chosen, values)

        def generate(self, job: Generate) -> list[Logprobs]:
            firsts = {item.tokens[: todo.asked(item)[0].begin]: item for item in todo.sequences}
            said = []
            for prompt, forced, count in zip(job.prompts, job.forced, job.counts, strict=True):
                first = firsts.get((*prompt, *forced))
                answer = first.tokens[len(prompt) + len(forced) :] if first else [7] * count
                said.append((*forced, *answer)[:count])
            return [self.made_up(tokens, prompt) for tokens, prompt in zip(said, job.prompts, strict=True)]

    monkeypatch.setattr(harness, "Engine", Knowing)
    for row in evaluate(tmp_path, todo).rows:
        figures = ("accuracy", 1.0) if row.regime == TEACHER_FORCED else ("exact", 0.5)
        assert row.metrics[figures[0]].value == figures[1], (row.task, row.regime)
        assert row.metrics["top1"].value == 1 if row.regime == TEACHER_FORCED else row.metrics["top1"].value <= 1
        if row.regime == TEACHER_FORCED:
            assert all(b.estimate.value == 1 for b in row.by_depth["accuracy"])
        if row.task == "variables":
            steps = {span.steps for item in todo.sequences if item.task == row.task for span in item.spans}
            assert row.regime == DECODING or {int(b.begin) for b in row.by_steps["accuracy"]} == steps

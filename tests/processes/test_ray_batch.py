"""examples/ray_batch.py: every row is answered once, even if processes are killed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray_cluster import ENGINE, PATIENCE, ROOT, Cluster

RAYS_OWN = "ignore:Support for class-based `config`|Pydantic V1 style `@root_validator`:DeprecationWarning"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400), pytest.mark.filterwarnings(RAYS_OWN)]
REASON = 'Ray Data is not installed: pip install "ray[data]==2.60.0" pyarrow==21.0.0 pandas==2.3.3 jsonref==1.1.0'
for module in ("pandas", "jsonref", "ray.data"):
    pytest.importorskip(module, reason=REASON)
arrow = pytest.importorskip("pyarrow", reason=REASON)
parquet = pytest.importorskip("pyarrow.parquet", reason=REASON)

SCRIPT = ROOT / "examples" / "ray_batch.py"
STRICT = "{% for m in messages %}{% if not m.role %}{{ raise_exception('whose words?') }}{% endif %}{% endfor %}"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant:' }}"
Rows = list[dict[str, Any]]
MEANT_OTHERWISE = {"model": "an adapter", "generated_text": "an answer", "params": 7, "row": 1.5, "empty": None}
"""Columns with names that mean something to Ray or to the script, and one without a type."""


@pytest.fixture(scope="module")
def chatty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with a chat template that begins with <bos>, as Llama's does."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_batch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def answers(folder: Path) -> Rows:
    files = sorted((folder / "answers").glob("*.json"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.wide
@pytest.mark.engine
def test_an_engine_and_then_the_job_are_killed(model: Path, tmp_path: Path, cluster: Cluster) -> None:
    rows: Rows = [{"id": i, "prompt": f"count from {i} to", "note": f"n{i}"} for i in range(60)]
    (tmp_path / "questions.jsonl").write_text(lines(rows))
    command = [str(SCRIPT), "questions.jsonl", "answers", "--model", str(model), *ENGINE, "--tokens", "150"]
    command += ["--piece", "2"]
    notes = tmp_path / "answers.done"

    def noted() -> list[Path]:
        return sorted(note for note in notes.glob("*.parquet") if ".pending" not in note.name)

    job = cluster.job(tmp_path, *command)
    job.until(lambda: len(noted()) >= 2)
    (engine,) = cluster.engines()
    os.kill(engine, signal.SIGKILL)
    job.until(lambda: engine not in cluster.engines())
    before = len(noted())
    job.until(lambda: len(noted()) >= before + 2)
    assert cluster.engines() not in ([], [engine])
    job.process.kill()
    job.wait()
    cluster.without_engines()
    assert "kvq: format=kitty2" in job.said()
    first = answers(tmp_path)
    assert 0 < len(first) < len(rows)

    # as if the job had been killed between writing these answers and noting them
    (torn, *_) = noted()
    torn.rename(torn.with_suffix(".pending.parquet"))
    assert (tmp_path / "answers" / f"{torn.stem}.json").exists()
    job = cluster.job(tmp_path, *command)
    assert job.wait() == 0, job.said()[-4000:]
    assert not (tmp_path / "answers" / f"{torn.stem}.json").exists()
    found = answers(tmp_path)
    assert sorted(row["id"] for row in found) == [row["id"] for row in rows]
    assert [{name: row[name] for name in rows[0]} for row in sorted(found, key=lambda row: row["id"])] == rows
    assert all(row["answer"] and row["tokens"] == 150 for row in found)
    kept = [row for row in first if row in found]
    assert len(kept) >= len(first) - 2, "rows that were answered have been answered again"

    job = cluster.job(tmp_path, *command)
    assert job.wait() == 0, job.said()[-4000:]
    assert len(answers(tmp_path)) == len(rows), "a job that is done answered again"


def a_worker_is_killed(cluster: Cluster, folder: Path, rows: Rows, *arguments: str) -> tuple[Rows, str]:
    """The answers of a job with two engines, one of which loses the Ray process that holds it; and the log."""
    (folder / "questions.jsonl").write_text(lines(rows))
    command = [str(SCRIPT), "questions.jsonl", "answers", *arguments, "--engines", "2", "--piece", "2"]
    job = cluster.job(folder, *command)
    # both have started; each holds up to 16 pieces, so neither has all
    job.until(lambda: job.said().count("kvq: format=") == 2, 2 * PATIENCE)
    before = cluster.engines()
    assert len(before) == 2
    worker = parent(before[0])
    assert worker in cluster.running("ray::")
    assert worker != parent(before[1])
    os.kill(worker, signal.SIGKILL)
    assert len(answers(folder)) < len(rows)
    job.until(lambda: before[0] not in cluster.engines())
    assert before[1] in cluster.engines()
    assert job.wait() == 0, job.said()[-4000:]
    assert "A worker died or was killed while executing a task" in job.said()
    return answers(folder), job.said()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


@pytest.mark.wide
@pytest.mark.engine
def test_a_worker_is_killed_and_rows_are_refused(model: Path, tmp_path: Path, cluster: Cluster) -> None:
    rows: Rows = [{"id": i, "prompt": f"count from {i} to", **MEANT_OTHERWISE} for i in range(60)]
    rows[7]["prompt"] = "count " * 600
    rows[20]["prompt"] = None
    found, said = a_worker_is_killed(cluster, tmp_path, rows, "--model", str(model), *ENGINE, "--tokens", "100")
    assert said.count("kvq: format=kitty2") >= 2  # a third one, if the others have not answered all before
    assert sorted(row["id"] for row in found) == [row["id"] for row in rows]
    found.sort(key=lambda row: row["id"])
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    refused = {row["id"]: row["error"] for row in found if row["error"]}
    assert sorted(refused) == [7, 20]
    assert "maximum context length" in refused[7]
    assert '"prompt" is not a text' in refused[20]
    for row in found:
        assert (row["answer"] == "", row["tokens"]) == ((True, 0) if row["id"] in refused else (False, 100))


@pytest.mark.weights
@pytest.mark.engine
def test_a_worker_is_killed_on_a_real_model(weights: Callable[[str], Path], tmp_path: Path, cluster: Cluster) -> None:
    """SmolLM2-135M with constants of its own."""
    model = weights("smollm2-135m")
    rows: Rows = [{"id": i, "prompt": f"The number after {i} is"} for i in range(60)]
    flags = ["--model", str(model), "--kv-cache-dtype", "klt3", "--enforce-eager", "--max-model-len", "512"]
    flags += ["--cpus", "0.1", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4", "--dtype", "float32"]
    flags += ["--tokens", "40"]
    found, said = a_worker_is_killed(cluster, tmp_path, rows, *flags)
    assert said.count("kvq: format=klt3") >= 2
    assert sorted(row["id"] for row in found) == [row["id"] for row in rows]
    assert all(row["answer"] and 0 < row["tokens"] <= 40 and not row["error"] for row in found)


@pytest.mark.wide
@pytest.mark.engine
def test_parquet_and_chats_on_two_engines(chatty: Path, tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "questions").mkdir()
    keys = [f"{part}{i:02}" for part in range(2) for i in range(12)]
    for part in range(2):
        rows = [
            {"key": key, "messages": [{"role": "user", "content": f"count to {key}"}], **MEANT_OTHERWISE}
            | {"seldom": "here" if key.endswith("05") else None}
            for key in keys
            if key[0] == str(part)
        ]
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "questions" / f"{part}.parquet")
    command = [str(SCRIPT), "questions", "answers", "--model", str(chatty), *ENGINE, "--id", "key", "--tokens", "100"]
    job = cluster.job(tmp_path, *command, "--engines", "2", "--piece", "2")
    job.until(lambda: len(cluster.engines()) == 2)
    assert job.wait() == 0, job.said()[-4000:]
    assert job.said().count("kvq: format=kitty2") == 2
    found = parquet.read_table(tmp_path / "answers").to_pylist()
    assert sorted(row["key"] for row in found) == keys
    columns = {"key", "messages", "answer", "tokens", "error", "seldom", *MEANT_OTHERWISE}
    assert all(set(row) == columns for row in found)
    assert sorted(row["key"] for row in found if row["seldom"]) == ["005", "105"]
    assert all(row[name] == value for row in found for name, value in MEANT_OTHERWISE.items())
    assert all(row["tokens"] == 100 and row["messages"][0]["role"] == "user" for row in found)


def options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"engines": 1, "cpus": 8, "piece": 256, "tokens": 4, "temperature": 0.0} | more)


def test_a_chat_has_the_tokens_of_its_template(chatty: Path, script: ModuleType) -> None:
    """One <bos>, which is the template's, and what asks for an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chatty)
    asked = script.Ask({}, tokenizer)({"id": 1, "messages": [{"role": "user", "content": "count"}]})
    text = tokenizer.decode(asked["tokenized_prompt"])
    assert text.count(tokenizer.bos_token) == 1
    assert text.startswith(tokenizer.bos_token)
    assert text.endswith("user: count\nassistant:")


def test_a_column_that_is_empty_in_a_piece_keeps_its_type(script: ModuleType, tmp_path: Path) -> None:
    """Otherwise a reader of the whole folder takes the first file's types, and fails at the next."""
    schema = arrow.schema([("id", arrow.int64()), ("seldom", arrow.string())])
    for number, seldom in enumerate([None, "here"]):
        piece = arrow.Table.from_pylist([{"seldom": seldom, "id": number}])
        parquet.write_table(script.typed(schema, piece), tmp_path / f"{number}.parquet")
    assert parquet.read_table(tmp_path).to_pylist() == [{"id": 0, "seldom": None}, {"id": 1, "seldom": "here"}]


NOTHING_TO_ASK: dict[str, tuple[Any, str]] = {
    "a prompt that is null": ("prompt", None),
    "an empty prompt": ("prompt", ""),
    "a message without a role": ("messages", [{"content": "a"}]),
    "no messages": ("messages", None),
}


@pytest.mark.parametrize("case", NOTHING_TO_ASK)
def test_a_row_that_can_not_be_asked_says_why(case: str, chatty: Path, script: ModuleType) -> None:
    from transformers import AutoTokenizer

    column, value = NOTHING_TO_ASK[case]
    tokenizer = AutoTokenizer.from_pretrained(chatty) if column == "messages" else None
    if tokenizer is not None:
        tokenizer.chat_template = STRICT
    row = {"id": 1, column: value}
    asked = script.Ask({}, tokenizer)(row)
    assert asked["__inference_error__"]
    assert script.answer(asked) == {**row, "answer": "", "tokens": 0, "error": asked["__inference_error__"]}


def test_a_gpu_for_each_rank(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data's own way, without what CPUs need."""
    monkeypatch.setattr(script.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(script.ray, "cluster_resources", lambda: {"GPU": 8.0})
    given = {"kv_cache_dtype": "kitty2", "tensor_parallel_size": 2}
    engine = script.AsyncEngineArgs(model="a", **given)
    config = script.config(engine, dict(given), options(engines=4))
    assert {name: config.engine_kwargs[name] for name in given} == given
    assert "distributed_executor_backend" not in config.engine_kwargs
    assert config.should_continue_on_error
    assert (config.placement_group_config, config.runtime_env, config.concurrency) == (None, None, (4, 4))
    with pytest.raises(SystemExit) as stop:
        script.config(engine, dict(given), options(engines=5))
    assert stop.value.code == "the cluster has 8 GPUs and the job needs 10; ask for fewer --engines"


def test_cores_for_each_rank(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(script.ray, "cluster_resources", lambda: {"CPU": 18.0})
    config = script.config(script.AsyncEngineArgs(model="a"), {}, options(engines=2))
    assert config.placement_group_config["bundle_per_worker"]["CPU"] == 8
    assert config.runtime_env["env_vars"]["OMP_NUM_THREADS"] == "8"
    with pytest.raises(SystemExit) as stop:
        script.config(script.AsyncEngineArgs(model="a"), {}, options(engines=3))
    assert "18 CPUs and the job needs 26, 2 of them for the rows" in str(stop.value.code)


JOB = """
import importlib.util, pathlib, runpy, sys
path, *names = sys.argv[1:]
for name in names:
    sys.argv = [path, f"{name}.jsonl", f"{name}.answers", "--model", "missing"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        print(f"refused: {stop.code}", flush=True)

spec = importlib.util.spec_from_file_location("ray_batch", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.config = lambda *_: None
asked = lambda row: {**row, "generated_text": "a", "num_generated_tokens": 1}
script.build_processor = lambda config: lambda rows: rows.map(asked)
sys.argv = ["ray_batch.py", "questions.jsonl", "answers", "--model", "missing", "--piece", "2"]
script.main()
torn = min(pathlib.Path("answers.done").iterdir())
torn.rename(torn.with_suffix(".pending.parquet"))
pathlib.Path("first").write_text("\\n".join(sorted(file.name for file in pathlib.Path("answers").iterdir())))
script.main()
"""
NO_ID = "can't tell which are answered"
REFUSED: dict[str, tuple[Rows, str]] = {
    "twice": ([{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}, {"id": 1, "prompt": "c"}], NO_ID),
    "missing": ([{"id": 1, "prompt": "a"}, {"prompt": "b"}], NO_ID),
    "broken": ([{"id": 1.5, "prompt": "a"}], "'id' must hold whole numbers or texts, and not double"),
    "nothing": ([{"id": 1}], """rows need the column 'id' (--id), and either "prompt" or "messages\""""),
    "both": ([{"id": 1, "prompt": "a", "messages": []}], """either "prompt" or "messages\""""),
    "other": ([{"key": 1, "prompt": "a"}], "rows need the column 'id' (--id)"),
    "taken": ([{"id": 1, "prompt": "a", "answer": "b"}], "the job writes a column 'answer'; give yours"),
    "error": ([{"id": 1, "prompt": "a", "error": "b"}], "the job writes a column 'error'; give yours"),
}
ROWS: Rows = [{"id": f"row {i}", "prompt": "a", **MEANT_OTHERWISE} for i in range(4)]


@pytest.fixture(scope="module")
def without_engines(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a process that runs the script for all of these leaves and says; none of them starts an engine."""
    folder = tmp_path_factory.mktemp("job")
    for name, (rows, _) in REFUSED.items():
        (folder / f"{name}.jsonl").write_text(lines(rows))
    (folder / "questions.jsonl").write_text(lines(ROWS))
    job = cluster.job(folder, "-c", JOB, str(SCRIPT), *REFUSED)
    assert job.wait() == 0, job.said()[-4000:]
    return folder, job.said()


def test_what_is_noted_is_not_answered_again(without_engines: tuple[Path, str]) -> None:
    """And what is written but not noted, as after a kill, is replaced."""
    folder, _ = without_engines
    found = sorted(answers(folder), key=lambda row: row["id"])
    assert found == [{**row, "answer": "a", "tokens": 1, "error": ""} for row in ROWS]
    first = (folder / "first").read_text().splitlines()
    now = sorted(file.name for file in (folder / "answers").iterdir())
    assert len(first) == len(now) > 1
    assert len(set(first) - set(now)) == 1


def test_refused_questions(without_engines: tuple[Path, str]) -> None:
    """Before a model is looked for."""
    folder, log = without_engines
    said = [line.removeprefix("refused: ") for line in log.splitlines() if line.startswith("refused: ")]
    assert len(said) == len(REFUSED), log[-4000:]
    for (name, (_, reason)), sentence in zip(REFUSED.items(), said, strict=True):
        assert sentence.startswith(f"{name}.jsonl: ")
        assert reason in sentence
    assert list(folder.glob("*.answers*")) == []


def test_files_of_other_kinds(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.csv").touch()
    with pytest.raises(SystemExit, match=r"files must be all \.jsonl or all \.parquet, and not \.csv, \.jsonl"):
        script.questions(tmp_path, "id")


@pytest.mark.parametrize("left", ["answers", "answers.done"])
def test_answers_and_what_is_noted_belong_together(left: str, script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / left).mkdir()
    assert script.noted(tmp_path / "answers").name == "answers.done"  # killed before it wrote anything
    (tmp_path / left / "a").touch()
    with pytest.raises(SystemExit, match=rf"{left} is there without answers.*delete both"):
        script.noted(tmp_path / "answers")

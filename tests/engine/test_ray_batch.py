"""examples/ray_batch.py: whatever is killed, every row is answered once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
REASON = 'Ray Data is not installed: pip install "ray[data]==2.60.0" pyarrow==21.0.0 pandas==2.3.3 jsonref'
pytest.importorskip("pandas", reason=REASON)
pytest.importorskip("jsonref", reason=REASON)
arrow = pytest.importorskip("pyarrow", reason=REASON)
pytest.importorskip("ray.data", reason=REASON)

from vllm_kvq.bench.server import free_port  # noqa: E402

ROOT = Path(__file__).parents[2]
MARK = "KVQ_TEST_RAY_BATCH"


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Stands in the environment of every process of a cluster and its job; what is left at the end is killed.

    The cluster counts four cores, however many there are.
    """
    value, port = f"{MARK}={tmp_path}", free_port("127.0.0.1")
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus", "4"]
    command += ["--include-dashboard=false", "--node-ip-address", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "cluster").open("wb") as log:
        cluster = subprocess.Popen(command, env=environment(value), stdout=log, stderr=log)
    (tmp_path / "address").write_text(f"127.0.0.1:{port}")
    yield value
    cluster.kill()
    cluster.wait()
    for pid in running(value):
        os.kill(pid, signal.SIGKILL)


def environment(mark: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    name, _, value = mark.partition("=")
    env = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", name: value}
    env["RAY_raylet_start_wait_time_s"] = "200"  # other test processes share the cores
    return env


def running(mark: str, named: str = "") -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment.split(b"\0") and named.encode() in command:
            found.append(int(folder.name))
    return found


def job(model: Path, folder: Path, mark: str, questions: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "examples" / "ray_batch.py"), questions, "answers", "--model", str(model)]
    command += ["--kv-cache-dtype", "kitty2", "--enforce-eager", "--max-model-len", "512", "--cpus", "0.1", *more]
    command += ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4"]
    env = environment(mark) | {"RAY_ADDRESS": (folder / "address").read_text()}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    code = process.wait(timeout=600)
    assert code == 0, (folder / "log").read_text()[-4000:]


def wait_for(process: subprocess.Popen[bytes], folder: Path, files: int) -> None:
    end = time.monotonic() + 600
    while len(list((folder / "answers").glob("*"))) < files:
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        assert time.monotonic() < end, (folder / "log").read_text()[-4000:]
        time.sleep(0.1)


def answers(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in (folder / "answers").glob("*.json") for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_an_engine_and_then_the_job_are_killed(model: Path, tmp_path: Path, mark: str) -> None:
    rows = [{"id": i, "prompt": f"count from {i} to", "note": f"n{i}"} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("questions.jsonl", "--tokens", "120", "--piece", "2")
    process = job(model, tmp_path, mark, *more)
    wait_for(process, tmp_path, 2)
    (engine,) = running(mark, "EngineCore")
    os.kill(engine, signal.SIGKILL)
    before = len(list((tmp_path / "answers").glob("*")))
    wait_for(process, tmp_path, before + 3)
    (other,) = running(mark, "EngineCore")
    assert other != engine
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while left := running(mark, "EngineCore"):
        assert time.monotonic() < end, left
        time.sleep(0.5)
    done = len(answers(tmp_path))
    assert 0 < done < len(rows)

    finish(job(model, tmp_path, mark, *more), tmp_path)
    found = answers(tmp_path)
    assert sorted(row["id"] for row in found) == [row["id"] for row in rows]
    assert {row["note"] for row in found} == {row["note"] for row in rows}
    assert all(row["answer"] and row["tokens"] for row in found)
    assert "kvq: format=kitty2" in (tmp_path / "log").read_text()

    finish(job(model, tmp_path, mark, *more), tmp_path)
    assert len(answers(tmp_path)) == len(rows), "a job that is done answered again"


def test_parquet(model: Path, tmp_path: Path, mark: str) -> None:
    import pyarrow.parquet

    (tmp_path / "questions").mkdir()
    for part in range(2):
        rows = [{"key": f"{part}{i}", "prompt": f"count to {i}"} for i in range(3)]
        pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "questions" / f"{part}.parquet")
    finish(job(model, tmp_path, mark, "questions", "--id", "key", "--tokens", "4"), tmp_path)
    found = pyarrow.parquet.read_table(tmp_path / "answers").to_pylist()
    assert sorted(row["key"] for row in found) == ["00", "01", "02", "10", "11", "12"]
    assert all(set(row) == {"key", "prompt", "answer", "tokens"} and row["tokens"] for row in found)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], "'id' is not another in every row"),
        ([{"id": 1}], "a row needs the column 'id' (--id), and either"),
        ([{"id": 1, "prompt": "a", "answer": "b"}], "the job writes a column 'answer'"),
    ],
)
def test_refusals(model: Path, tmp_path: Path, mark: str, rows: list[dict[str, Any]], said: str) -> None:
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert job(model, tmp_path, mark, "questions.jsonl").wait(timeout=200) == 1
    log = (tmp_path / "log").read_text()
    assert said in log
    assert "Traceback" not in log

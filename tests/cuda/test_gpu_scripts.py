"""What can be tested of the GPU scripts without a GPU: arguments, refusals, and the lines of the table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from vllm_kvq.bench.gpu import chunks, rivals
from vllm_kvq.bench.gpu import table as gpu
from vllm_kvq.bench.gpu.decode import N, Shape
from vllm_kvq.bench.gpu.kept import Kept
from vllm_kvq.bench.gpu.results import Results
from vllm_kvq.cli.bench import gpu as gpu_command
from vllm_kvq.cli.bench import plot

ROOT = Path(__file__).resolve().parents[2]


def bash(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("SITE", "WHEELS", "MODEL", "PORT")} | variables
    return subprocess.run(["bash", *command], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["bench/gpu.sh", "bench/gpu_serve.sh"])
def test_scripts_parse_and_refuse_what_they_do_not_know(script: str) -> None:
    assert bash("-n", script).returncode == 0
    assert bash(script, "--help").stdout.startswith(("All that needs a GPU", "`vllm serve`"))
    done = bash(script, "--fast")
    assert done.returncode == 2
    assert "unknown option --fast" in done.stderr


def test_serve_script_says_what_it_would_do() -> None:
    done = bash("bench/gpu_serve.sh", "--dry-run", "qjl3", "auto", WHEELS="wheels", MODEL="model", CACHE_BYTES="5G")
    assert done.returncode == 0, done.stderr
    assert "--no-index --find-links wheels" in done.stdout
    shared = "-- --gpu-memory-utilization 0.45 --kv-cache-memory-bytes 1G\n"
    assert f"-m proof demo --once --kv-cache-dtype qjl3 --port 8000 --model model {shared}" in done.stdout
    assert f"-m proof demo --once --kv-cache-dtype auto --port 8001 --model model {shared}" in done.stdout
    timed = (
        "bench/gpu_serve.py --caches auto,fp8,klt3 --model model --cache-bytes 5G --out docs/results/gpu-serve.csv\n"
    )
    assert done.stdout.endswith(timed)
    offline = bash("bench/gpu_serve.sh", "--dry-run", SITE="site")
    assert "venv" not in offline.stdout
    assert next(x.split()[-1] for x in offline.stdout.splitlines() if x.startswith("==")) == "auto"


def test_the_figure_is_of_the_files_that_bench_gpu_wrote(tmp_path: Path) -> None:
    """The folder has other CSV files of GPUs, as docs/results does. `python` only prints its arguments."""
    written = tmp_path / "gpu-nvidia-h200.csv"
    for file in (ROOT / "docs" / "results").glob("gpu-*.csv"):
        shutil.copy(file, tmp_path)
    assert {written.name, "gpu-serve.csv"} < {file.name for file in tmp_path.iterdir()}
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    folders = {"RESULTS": str(tmp_path), "PASSED": str(tmp_path / "passed")}
    done = bash("bench/gpu.sh", "--dry-run", PYTHON=str(python), **folders)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"-m vllm_kvq bench plot {written}"
    Kept.of(written)  # which would refuse a file with another header
    written.unlink()
    done = bash("bench/gpu.sh", "--dry-run", PYTHON=str(python), **folders)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "LEFT OUT: the figure (nothing was measured)")


@pytest.mark.engine
@pytest.mark.wide
def test_servers_are_timed(tmp_path: Path) -> None:
    """The script on a tiny model: every cell of both caches, and the load."""
    out = tmp_path / "serve.csv"
    command = [sys.executable, "bench/gpu_serve.py", "--dry-run", "--caches", "auto,kitty2", "--cache-bytes", "1G"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row.split(",") for row in out.read_text().splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        [cache, *shape] for cache in ("auto", "kitty2") for shape in (["1", "64"], ["2", "128"], ["3", "128"])
    ]
    assert all(float(row[3]) > 0 and float(row[5]) > 0 for row in rows[1:])


def test_lines_of_the_table() -> None:
    shape = Shape(8, 4096)
    # 4 MB in 100 us at 100 GB/s of read and write: 40 % of it
    cells = gpu.line("qjl3", shape, 1e-4, 2.5e-4, 1.5e-4, 2e-4, 4_000_000, 1e11).split()
    assert cells == ["qjl3", "8", "4096", "100.0", "250.0", "150.0", "200.0", "2.50", "1.50", "4.0", "40%"]
    assert gpu.line("qjl3", shape, 1e-4, 2.5e-4, None, 2e-4, 4_000_000, 1e11).split().count("n.m.") == 2
    rows = [(1024, 3e-4, 1e-4), (4096, 4e-4, 4e-4), (16384, 5.2288e-4, 9e-4)]
    assert gpu.summary("qjl3", 8, rows).split() == ["qjl3", "batch", "8", "slope", "1.250", "break-even", "4096"]
    assert "break-even none" in gpu.summary("qjl3", 1, rows[:1])


WITHOUT_VLLM = "import runpy, sys; sys.modules['vllm'] = None; runpy.run_module('vllm_kvq', run_name='__main__')"


def dry_run(folder: Path) -> str:
    command = [
        sys.executable,
        "-c",
        WITHOUT_VLLM,
        "bench",
        "gpu",
        "--dry-run",
        "--formats",
        "squat2",
        "--out",
        str(folder),
    ]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.wide
def test_a_run_that_is_cut_off_loses_nothing(tmp_path: Path) -> None:
    said = dry_run(tmp_path)
    file = tmp_path / "gpu-dry-run-times-mean-nothing.csv"
    whole = file.read_text()
    assert [row.split()[:3] for row in said.splitlines()[2:4]] == [["sdpa", "1", "64"], ["squat2", "1", "64"]]
    assert said.strip().splitlines()[-1].strip() in file.with_suffix(".md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert all(f">{cell}<" in page for row in said.splitlines()[2:4] for cell in row.split())
    # cut off in the middle of its last line, whose numbers are all ignored; the others are not measured again
    file.write_text(whole[:-2])
    again = dry_run(tmp_path)
    assert again.splitlines()[:-1] == said.splitlines()[:-1]
    assert len(Results(tmp_path, "dry run: times mean nothing").rows) == len(whole.splitlines()) - 1


def not_now(*_: object) -> NoReturn:
    pytest.fail("a measurement was started")


@pytest.mark.parametrize("out", [False, True])
def test_no_seconds_start_no_measurement(
    out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of a decode step, nor of a prompt or a chunk; the folder of results is made all the same."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module, name in ((gpu, "copy_bandwidth"), (gpu, "prefill_seconds"), (chunks, "plain_seconds")):
        monkeypatch.setattr(module, name, not_now)
    more = ["--out", str(tmp_path / "new")] if out else []
    assert gpu_command.main(["--dry-run", "--seconds", "0", "--formats", "kitty2", "--json", *more]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == []
    written = [file.name for file in tmp_path.glob("new/*")]
    assert written == ["gpu-dry-run-times-mean-nothing.md"] * out
    assert not out or "ran out of time" in (tmp_path / "new" / written[0]).read_text()


def test_what_was_measured_before_is_shown_when_there_is_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, where = Results(tmp_path, "A GPU"), torch.device("cpu")
    kept.take("copy", 0, 0, lambda: (1e-11, 1))
    for name in ("sdpa", "kitty2"):
        kept.take(name, 1, 64, lambda: (1e-3, 100))
    for what, tokens in (("a layer's prefill", 64), ("packing kitty2", 64)):
        kept.take(what, 1, tokens, lambda: (1e-3, 0))
    for what in ("chunk bf16 by PyTorch's SDPA", "chunk kitty2 unpacked", "chunk kitty2 by pages"):
        kept.take(what, 1, 2 * N, lambda: (1e-3, 0))
    monkeypatch.setattr(rivals, "measure", not_now)
    late = Results(tmp_path, "A GPU", deadline=0, say=lambda _: None)
    names = ["squat2", "kitty2"]
    gpu.run(where, names, [Shape(1, 128), Shape(1, 64)], late)
    gpu.run_prompts(where, names, 64, late)
    chunks.run(where, names, late)
    shown = [line.split()[0] for line in late.lines if line]
    assert [shown.count(name) for name in ("sdpa", "kitty2", "squat2")] == [1, 4, 0]
    assert late.notes == ["batch 1 context 128: left out, no time"]


def test_what_was_compiled_is_a_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched: list[list[str]] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "A GPU")
    monkeypatch.setattr(gpu_command, "launch_once", lambda names, device: launched.append(names))
    assert gpu_command.main(["--compile", "--formats", "kitty2,klt3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"device": "A GPU", "compiled": ["kitty2", "klt3"]}
    assert launched == [["kitty2", "klt3"]]


def test_times_of_another_torch_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Results(tmp_path, "A GPU").take("squat2", 1, 64, lambda: (1e-3, 100))
    assert Results(tmp_path, "A GPU").take("squat2", 1, 64, lambda: (2e-3, 100)).seconds == 1e-3
    monkeypatch.setattr("torch.__version__", "another")
    assert Results(tmp_path, "A GPU").take("squat2", 1, 64, lambda: (2e-3, 100)).seconds == 2e-3
    assert (tmp_path / "gpu-a-gpu.csv").exists()


def test_the_figure_shows_only_decode_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Results(tmp_path, "A GPU")
    kept.take("copy", 0, 0, lambda: (1e-3, 100))
    kept.take("packing squat2", 1, 4096, lambda: (1e-3, 0))
    file = tmp_path / "gpu-a-gpu.csv"
    assert plot.main([str(file)]) == 1
    assert (
        capsys.readouterr().err
        == f"vllm-kvq bench plot: no plot of {file}: {file} holds no decode times next to bf16's\n"
    )
    for batch, context in ((8, 4096), (1, 4096), (1, 1024)):
        for name in ("sdpa", "squat2"):
            kept.take(name, batch, context, lambda: (1e-3, 100))
    assert plot.main([str(file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'gpu-a-gpu.png'}\n"
    assert (tmp_path / "gpu-a-gpu.png").read_bytes().startswith(b"\x89PNG")

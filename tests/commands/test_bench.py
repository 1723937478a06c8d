"""The benchmark commands run, against vLLM itself, and print and write what they promise. Tiny shapes."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvq.bench import slow, steps
from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.bench.servers import serve
from vllm_kvq.bench.steps import Shape, kvq_candidate
from vllm_kvq.bench.timing import copy_bandwidth, slopes
from vllm_kvq.bench.vllm_build import no_fp8
from vllm_kvq.cli.bench import attention
from vllm_kvq.cli.bench import prefill as prefill_command
from vllm_kvq.cli.bench import serve as serve_command
from vllm_kvq.cli.bench import slow as slow_command
from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.table import public_formats
from vllm_kvq.kernels.cpu.processor import processor_name

ROOT = Path(__file__).parents[2]
SMALL = ["--query-heads", "4", "--kv-heads", "1", "--head-size", "64", "--threads", "1", "--rounds", "3"]


def test_attention_prints_ratios_and_writes_csv_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--out", str(tmp_path)]
    contexts = ["--context", "1024,4096,5120,6144", "--rotate", "2"]
    assert attention.main([*SMALL, *contexts, "--formats", "squat2,innerq2", *files]) == 0
    printed = capsys.readouterr().out
    kernels = {"bf16", "fp8", "squat2", "innerq2"} - ({"fp8"} if no_fp8(64) else set())
    for name in kernels:
        assert f"\n  {name}" in printed
    assert "x bf16  limit" in printed
    assert "caches 2" in printed
    assert "(1.00 = linear)" in printed
    rows = list(csv.DictReader((tmp_path / "cpu-attention.csv").open()))
    assert len(rows) == 4 * len(kernels)
    assert all(float(row["ms"]) > 0 and float(row["x_bf16"]) > 0 for row in rows)
    # the packed cache has as few bytes as it says: less than a third of bf16's
    size = {row["kernel"]: int(row["bytes"]) for row in rows if row["context"] == "6144"}
    assert size["squat2"] < size["bf16"] / 3
    assert (tmp_path / "cpu-attention.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert all(page.count(f">{name}<") >= 4 for name in kernels)
    assert f"bench attention {shlex.join([*SMALL, *contexts])}" in page


def test_a_slow_head_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main([*SMALL, "--head-size", "512", "--context", "512", "--formats", "polar4"]) == 0
    assert "polar4 is attended slowly here" in capsys.readouterr().out


def test_a_head_size_that_vllm_has_no_fp8_cache_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--head-size", "80", "--context", "512", "--formats", "squat2"]
    assert attention.main(arguments) == 0
    assert f"{no_fp8(80)}: ours is compared only with bf16" in capsys.readouterr().out
    assert attention.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["kernel"] for row in document["rows"]] == ["bf16", "squat2"]
    assert all(row["ms"] > 0 and row["x_bf16"] > 0 and "x_fp8" not in row for row in document["rows"])
    assert any("no fp8 cache" in note for note in document["notes"])


@pytest.mark.wide
def test_vllm_held_to_avx2_uses_nothing_newer() -> None:
    """The wheel's build for AVX2 has neither AVX-512 nor AMX, whatever the processor has."""
    command = [
        sys.executable,
        "-m",
        "vllm_kvq",
        "bench",
        "attention",
        *SMALL,
        "--context",
        "1024",
        "--formats",
        "squat2",
    ]
    environment = {**os.environ, "VLLM_KVQ_ISA": "avx2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "vLLM's build for AVX2 has no fp8 cache" in done.stdout
    assert "triton_kernels" not in done.stdout + done.stderr  # started in the checkout, where a folder has that name


def test_the_slow_ones_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "HEAD_SIZES", (96,))
    monkeypatch.setattr(slow, "OPTIONS", slow.OPTIONS[:1])
    formats = public_formats()[:3]
    monkeypatch.setattr(slow_command, "public_formats", lambda: formats)
    assert slow_command.main(["--context", "256", "--rounds", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "256 tokens, 1 thread(s), " + processor_name() in printed
    assert len(re.findall(r"^\| `\w+` \| \d+\.\d\d \|$", printed, re.M)) == len(formats)
    assert re.search(r"^\| `squat2` \| `group: 16` \| \d+\.\d\d \| \d+\.\d \|$", printed, re.M)
    page = (tmp_path / "report.html").read_text()
    assert all(f">{figure}<" in page for figure in re.findall(r"\d+\.\d\d", printed[printed.index("| times bf16") :]))


def test_prompts_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With their lengths, on the page as in what is printed."""
    assert prefill_command.main([*SMALL, "--context", "256,512", "--formats", "kitty2", "--out", str(tmp_path)]) == 0
    printed = re.findall(r"prompt of (\d+): fit +([\d.]+) ms  pack +([\d.]+) ms", capsys.readouterr().out)
    assert [prompt for prompt, *_ in printed] == ["256", "512"]
    page = (tmp_path / "report.html").read_text()
    assert all(f">{figure}<" in page for figures in printed for figure in figures)
    assert len((tmp_path / "prefill.csv").read_text().splitlines()) == 3


def test_impossible_shapes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        attention.main(["--query-heads", "6", "--kv-heads", "4"])
    assert stop.value.code == 2
    assert "6 query heads can't share 4 KV heads" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        attention.main(["--formats", "squat2,squad2"])
    assert "argument --formats: unknown KV cache format 'squad2'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least 1"):
        Shape(0, 1, 4, 1, 64, 128, 1)


def test_a_straight_line_has_slope_one() -> None:
    assert slopes({1024: 9.0, 4096: 1.0, 8192: 2.0, 16384: 4.0}) == [1.0, 1.0]
    assert slopes({4096: 1.0, 8192: 2.0}) == []


def test_copy_bandwidth_is_a_memory_speed() -> None:
    assert 1e8 < copy_bandwidth(8 << 20, rounds=3) < 1e13


@pytest.mark.wide
@pytest.mark.engine
def test_serve_compares_two_real_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SETTLE_SECONDS", 0.0)  # no times are judged here
    model = random_model(tmp_path / "model", hidden=128, layers=1, vocab=512, dtype="bfloat16")
    sizes = ["--context", "64,256", "--batch", "2", "--tokens", "96", "--rounds", "1", "--cold", "1", "--eager"]
    assert serve_command.main([str(model), "--out", str(tmp_path), *sizes]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "kitty2 against bf16"
    cells = [line.split() for line in printed[3:]]
    assert [cell[:2] for cell in cells] == [["64", "2"], ["256", "2"]]
    assert all(float(x) > 0 for cell in cells for x in cell[2:10])
    share, kernel, expected, most = (float(x.rstrip("%")) for x in cells[1][10:])
    assert 0 <= share < 100
    assert kernel > 0
    # printed to half a per cent, which matters where the share is large
    near = [serve.gain(share / 100 + s, kernel + k) for s in (-0.005, 0.005) for k in (-0.005, 0.005)]
    assert min(near) - 0.01 <= expected <= max(near) + 0.01
    assert min(1.0, kernel) - 0.01 <= expected <= most + 0.01
    assert "kvq: format=kitty2" in (tmp_path / "bench-kitty2.log").read_text()
    assert "kvq: format" not in (tmp_path / "bench-bf16.log").read_text()
    page = (tmp_path / "report.html").read_text()
    assert all(f">{text}<" in page for cell in cells for text in cell)


class Seen(list[PageFormat]):
    """Kernels that only note what they are called with."""

    def attend_step(self, fmt: PageFormat, *rest: object) -> bool:
        self.append(fmt)
        return True


@pytest.mark.parametrize("name", ["klt3", "qjl3"])
def test_each_cache_that_is_read_in_turn_is_another_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With constants or a sketch of its own, which a step has to read from memory, too."""
    seen = Seen()
    monkeypatch.setattr(steps, "kernels_for", lambda *asked: seen)
    for step in kvq_candidate(Shape(256, 1, 2, 1, 64, 128, rotate=2), name).steps:
        step()
    one, other = seen
    assert one.keys is not other.keys
    assert (one.geometry.layer, other.geometry.layer) == (0, 1)

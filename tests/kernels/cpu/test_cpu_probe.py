"""The kernels for VNNI on processors without it, and the counter of instructions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proof.kernels import probe
from proof.tables import instructions
from vllm_kvq.kernels.build import build
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu.library import ISAS, library

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="x86-64 Linux"),
    pytest.mark.skipif(library() is None, reason="no C++ compiler"),
]


def code() -> tuple[int, int]:
    return probe.code_of(build().name)


def test_only_the_library_counts_and_always_alike() -> None:
    query = torch.randn(1, 1, 4, 64)
    key = torch.randn(1, 32, 1, 64)
    seen = torch.ones(1, 1, 32, dtype=torch.bool)

    def step() -> None:
        cpu.attend_raw(query, key, key, seen, 1.0)

    step()
    counted = probe.count(step, code())
    rows = 4 * 32 * 64  # of elements; two products for each, up to 16 at a time
    assert 2 * rows / 16 < counted < 4 * rows
    assert probe.count(step, code()) == counted
    assert probe.count(lambda: torch.randn(10) @ torch.randn(10), code()) == 0


def test_more_query_heads_take_more_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    shape = ["--formats", "kivi2", "--head-size", "64", "--no-baseline"]
    for heads in ("1", "4"):
        assert instructions.main([*shape, "--queries-per-kv", heads]) == 0
        found.append(float(capsys.readouterr().out.split()[-1]))
    assert 0 < found[0] < found[1] < 4 * found[0]


@pytest.mark.slow
def test_vnni_kernels_on_any_avx512() -> None:
    if ISAS[int(library().best_isa())] == "avx512":  # type: ignore[union-attr]
        pytest.skip("this processor has them: the other tests run them")
    tests = ["test_cpu_step.py", "test_cpu_attend.py"]
    chosen = "avx512 and not avx512bw and (test_one_call or (heads_and_groups and 4-128) or (test_pages_ranges and 32))"
    done = subprocess.run(
        [sys.executable, "-m", "proof", "probe", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
        + [f"tests/kernels/cpu/{name}" for name in tests],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    if "this processor has no AVX-512" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout

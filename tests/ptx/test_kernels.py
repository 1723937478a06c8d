"""The kernels that a GPU would run, from the PTX that Triton and nvcc make of them, in the tests of their sources.

`python -m proof ptx -m pytest tests/triton tests/cuda` runs all of those tests; here, some run in separate processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvq.kernels.gpu import build as build_cuda

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    done = subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def run(target: int, *arguments: str) -> str:
    everything = ["-q", "-W", "ignore", "-m", "wide or not wide"]
    return python("proof", "ptx", "--target", str(target), "-m", "pytest", *everything, *arguments)


@pytest.mark.parametrize(
    ("target", "chosen", "count"),
    [
        # bfloat16, whose prompts go to the matrix units of a warp group; float32
        (90, "traffic and polar3", 1),
        pytest.param(90, "traffic and innerq2", 1, marks=pytest.mark.wide),
        (80, "float64 and (squat2-64 or innerq2-64 or polar4-64 or kivi4-64)", 4),
        pytest.param(
            80, "float64 and klt3-64 or codecs and (klt3-64 or klt4-80 or klt3-80)", 4, marks=pytest.mark.wide
        ),
        pytest.param(90, "reference_cache and klt3", 1, marks=pytest.mark.wide),
        pytest.param(90, "large_pools and squat2", 1, marks=pytest.mark.wide),
        pytest.param(90, "float64 and kitty2-64 or codecs and (kitty2-64 or kitty2-80)", 3, marks=pytest.mark.wide),
    ],
)
def test_triton_kernels(target: int, chosen: str, count: int) -> None:
    assert f"\n{count} passed" in run(target, "tests/triton", "-k", chosen)


@pytest.mark.skipif(build_cuda.nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ("float64 and 64-4 or packed_bytes_agree and 64- or large_pools", 5),
        pytest.param("float64 and 128-8", 1, marks=pytest.mark.wide),
    ],
)
def test_cuda_kernels(chosen: str, count: int) -> None:
    files = (f"tests/cuda/{name}.py" for name in ("test_cuda_emulated", "test_large_pools_cuda"))
    assert f"\n{count} passed" in run(90, *files, "-k", chosen)


def test_decode_loads_each_byte_once() -> None:
    """No more than a record's sectors, and no instruction that requests a sector that another one has requested."""
    out = python("proof", "traffic", "--formats", "kivi2,innerq2", "--head-size", "64", "--check")
    assert [line.split()[1] for line in out.splitlines()[2:]] == ["kivi2", "innerq2"]


def test_pytest_gets_no_workers() -> None:
    """Workers would be processes whose kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "proof", "ptx", "-m", "pytest", "-n", "2", "tests/ptx/test_machine.py"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 4
    assert "unrecognized arguments: -n" in done.stderr

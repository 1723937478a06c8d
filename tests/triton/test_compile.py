"""Binaries for two targets, built without a GPU: no spills, and matrix products in the inner loop of decode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("target", "kernels"),
    [
        ("90", ["d=128 rows=16", "pack innerq2 d=128", "decode in full precision d=128"]),
        ("80", ["decode squat2 d=128 rows=16"]),
    ],
)
def test_no_spills_and_matrix_instructions(target: str, kernels: list[str]) -> None:
    """In a process of its own: here the kernels belong to the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "vllm_kvq.eval.compile_table"]
    command += ["--targets", target, "--only", *kernels, "--check"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| decode squat2" in done.stdout


def test_instructions_per_element_of_squat2() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    code = (
        "from vllm_kvq.eval import compile_table as t\n"
        "v = next(v for v in t.variants(90) if v.name == 'decode squat2 d=128 rows=16')\n"
        "print(t.usage(t.build(v, 90)).loop * 32 * v.warps / v.elements)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3.0

"""Binaries built without a GPU: no spills, matrix products in the inner loop of decode, few instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proof.tables import attended
from proof.tables.gpu.compile_table import limit
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.gpu.triton.layout import constants

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("target", "kernels"),
    [
        # at 32 query heads on 8 KV heads; `python -m proof compile --check` goes through everything
        (
            "90",
            [
                *(f"attend {name} d=128 rows=8" for name in ("kivi2", "squat2", "innerq2", "polar4", "klt3")),
                *("pack innerq2 d=128", "decode in full precision d=128"),
            ],
        ),
        ("80", ["attend kivi2 d=128 rows=8"]),
    ],
)
def test_no_spills_and_few_instructions(target: str, kernels: list[str]) -> None:
    """In a separate process: here the kernels belong to the interpreter. Triton keeps what it compiled."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "proof", "compile", "--without-cuda"]
    command += ["--targets", target, "--only", ",".join(kernels), "--check"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {kernel}" in done.stdout for kernel in kernels)


@pytest.mark.parametrize(("plain", "squat"), [("kitty2", "squat2"), ("kivi4", "squat4")])
def test_squat_is_attended_as_what_it_corrects(plain: str, squat: str) -> None:
    """One row of the table for both: only packing does the correction."""
    one, other = (constants(get_format(name).bind(Geometry(128, 64))) for name in (plain, squat))
    assert one == other is not None


def test_every_kernel_that_decodes_has_a_limit() -> None:
    """A new format's, too."""
    kernels = attended.shared()
    assert {"kivi2", "qjl3", "polar3"} <= set(kernels)
    limits = {name: limit(f"attend {name} d=128 rows=8") for name in kernels}
    assert all(limits.values())
    assert (limits["kivi2"], limits["squat2"], limits["polar3"]) == (2.0, 3.0, 4.5)
    assert limit("attend kivi2 d=128 rows=16") is limit("pack kivi2 d=128") is None

"""The kernels for AVX-512 and AMX where SIMDe computes what the processor has no instructions for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proof.kernels import emulate
from vllm_kvq.kernels.cpu.library import ISAS, library

ROOT = Path(__file__).resolve().parents[3]
SIMDE = "KVQ_SIMDE"
"""A variable that names a checkout of SIMDe."""


def emulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proof", "emulate", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2000,
    )


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(2400)
@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_every_kernel_is_held_to_the_reference() -> None:
    best = ISAS[int(library().best_isa())]  # type: ignore[union-attr]
    if best in ("portable", "avx512"):
        pytest.skip(f"the best that this processor has is {best}; this is for those with AVX2 and without VNNI")
    if not (simde := os.environ.get(SIMDE)):
        pytest.skip(f"git clone --depth 1 https://github.com/simd-everywhere/simde, and set {SIMDE} to that folder")
    tests = [f"tests/kernels/{name}" for name in ("cpu", "step", "fuzz")]
    chosen = "(avx512 or tiles) and not emulated"
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", chosen]
    done = emulated("--without", "avx2", simde, "--", *run)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout


def test_a_folder_without_simde(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        emulate.main([str(tmp_path)])
    assert "git clone --depth 1 https://github.com/simd-everywhere/simde" in capsys.readouterr().err

"""The C++ kernels built with the address and undefined-behaviour sanitizers, under the fuzz tests.

In the usual lane those tests run with the usual library, and tensors between pages that nobody may touch
(tests/kernels/guard_pages.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvq.kernels.cpu.library import ISAS, library

ROOT = Path(__file__).resolve().parents[3]
FUZZ = [f"tests/kernels/fuzz/test_cpu_{name}.py" for name in ("fuzz", "fuzz_pack", "fuzz_decode")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,
    pytest.mark.skipif(shutil.which("g++") is None or library() is None, reason="sanitizers need g++"),
]


def sanitized(*command: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    left_out = ["--without", ",".join(without)] if without else []
    build = [sys.executable, "-m", "proof", "sanitize", *left_out, "address,undefined", "--"]
    return subprocess.run(
        [*build, sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )


BEYOND = """
import numpy, torch
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.torch.lists import PageList
fmt = get_format("kivi2").bind(Geometry(64, 32, torch.float16))
page = numpy.zeros((1, 1, fmt.record_bytes), numpy.uint8)
two = numpy.lib.stride_tricks.as_strided(page, (2, 1, fmt.record_bytes), page.strides)  # the second one is not there
one = torch.ones(1, dtype=torch.int64)
listed = PageList(one, 0 * one, 0 * one, 32 * one)
cpu.attend_packed(fmt, torch.ones(1, 1, 1, 64), torch.from_numpy(two), listed, 1.0)
"""


def between() -> tuple[str, ...]:
    """The instruction sets between the portable kernels and this processor's best."""
    usual = library()
    assert usual is not None
    return ISAS[1 : int(usual.best_isa())]


def left_out() -> tuple[str, ...]:
    """What the usual build does without. Tiles can only be run where the processor has them."""
    usual = library()
    assert usual is not None
    return between() if usual.has_byte_tiles(ISAS.index("avx512")) else (*between(), "amx")


def nothing_is_found(chosen: str, without: tuple[str, ...] = ()) -> None:
    tests = sanitized("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FUZZ, "-k", chosen, without=without)
    assert tests.returncode == 0, (tests.stdout + tests.stderr)[-6000:]
    assert " passed" in tests.stdout


def test_nothing_reads_or_writes_outside_its_tensors() -> None:
    caught = sanitized("-c", BEYOND, without=left_out())
    assert caught.returncode == 97, caught.stderr[-3000:]
    # an overflow, or a use after free where the allocator had given the neighbouring bytes back
    assert "AddressSanitizer: heap-" in caught.stderr, caught.stderr[-3000:]
    assert "attend_packed" in caught.stderr
    nothing_is_found(" and ".join(f"not {name}" for name in between()), without=left_out())


def test_nor_with_fewer_instructions() -> None:
    """The kernels for AVX2 are those for AVX-512 with narrower vectors."""
    if not between():
        pytest.skip("this processor has no better instructions than AVX2's")
    nothing_is_found(" or ".join(between()))

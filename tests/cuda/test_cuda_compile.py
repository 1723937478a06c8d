"""Binaries without a GPU: no spills, matrix products in the loop, and a clear message where nothing can be built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from proof.tables.gpu import compile_cuda, compile_table
from vllm_kvq.kernels import build
from vllm_kvq.kernels.gpu import build as build_cuda

needs_nvcc = pytest.mark.skipif(build_cuda.nvcc() is None, reason="no nvcc")
A_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"


@needs_nvcc
@pytest.mark.parametrize("target", build_cuda.ARCHITECTURES)
def test_decode_has_no_spills_and_few_instructions(target: int) -> None:
    """The variant of 32 query heads on 8 KV heads of 128 channels; the goal was 3 instructions per element."""
    variant = next(v for v in compile_cuda.variants() if v.name == "attend qjl3 d=128 rows=8")
    u = compile_table.cuda_usage(variant, target)
    assert u.stack == 0
    # 24 steps of 16 sketch rows and 16 products of value codes for 2 x 16 tokens, 2 for zeros
    assert u.matrix == 24 * 2 + 16 + 2
    assert u.loop / (2 * 128) < 3


@needs_nvcc
@pytest.mark.parametrize("name", ["query qjl3 d=128 rows=16", "pack qjl3 d=256", "attend qjl3 d=256 rows=16"])
def test_other_kernels_have_no_spills(name: str) -> None:
    variant = next(v for v in compile_cuda.variants() if v.name == name)
    assert compile_table.cuda_usage(variant, 90).stack == 0


def test_architectures() -> None:
    wanted = {(8, 0): 80, (8, 6): 86, (8, 7): 86, (8, 9): 89, (9, 0): 90, (10, 0): 100, (10, 3): 100, (12, 1): 120}
    for capability, architecture in wanted.items():
        assert build_cuda.architecture_for(capability) == architecture
    with pytest.raises(build.BuildError, match=r"compute capability 7.5; they are for 8.0"):
        build_cuda.architecture_for((7, 5))


def test_without_nvcc_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path))
    monkeypatch.setattr(build_cuda, "nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="no nvcc on the path"):
        build_cuda.build(90)
    assert "no nvcc on the path" in (build_cuda.why_not((9, 0)) or "")
    # a library that is already there serves without nvcc
    path = tmp_path / f"cuda-sm90-{build_cuda._digest(build_cuda.FLAGS)}.so"
    path.touch()
    with pytest.raises(build.BuildError, match="no nvcc on the path"):
        build_cuda.build(90)  # an empty file is no library
    shutil.copy(A_LIBRARY, path)
    assert build_cuda.build(90) == path
    assert build_cuda.why_not((9, 0)) is None
    assert "compute capability 7.5" in (build_cuda.why_not((7, 5)) or "")

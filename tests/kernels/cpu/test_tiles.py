"""Tiles of bf16 numbers (csrc/cpu/attend/amx): on a processor with AMX, or with tiles that are emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_fuzzing import IN_CPP
from test_cpu_attend import case, packed_pages, reference

from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.kernels.build import EXTRA_FLAGS
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu import call
from vllm_kvq.kernels.cpu.library import ISAS, library

ROOT = Path(__file__).resolve().parents[3]
VNNI = ISAS.index("avx512")
EMULATED = ["-O1", "-DKVQ_EMULATED_TILES", *(f"-DKVQ_WITHOUT_{name.upper()}" for name in ISAS[1:])]
"""Flags of a library with tiles and the portable kernels, which compiles in seconds."""
ROUNDED = 2**-8
"""The most by which rounding weights and values to 8 bits each changes an output."""

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library().has_tiles(VNNI):  # type: ignore[union-attr]
        pytest.skip("this library has no tiles here: test_with_emulated_tiles")
    monkeypatch.setattr(call, "isa", lambda: VNNI)


def test_with_emulated_tiles() -> None:
    if library().has_tiles(VNNI):  # type: ignore[union-attr]
        pytest.skip("this processor has tiles: the other tests use them")
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor can't round to bf16 as those with tiles do")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not emulated"],
        cwd=ROOT,
        env={**os.environ, EXTRA_FLAGS: " ".join(EMULATED)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def run(
    name: str, d: int, gqa: int, N: int, lengths: tuple[int, ...], q: int, heads: int = 1, low: int = 0,
    seed: int = 0, cap: float = 0.0, **options: Any,
) -> None:  # fmt: skip
    fmt, (query, pool, listed, scale, _), _ = case(
        name, d, gqa, N, lengths, q, heads, low, seed, torch.bfloat16, tuple(options.items()), cap
    )
    query = query.bfloat16()
    out, lse = cpu.attend_packed(fmt, query, pool, listed, scale, cap)
    clean = packed_pages(fmt, len(pool) - 1, heads, seed)  # `case` has put NaN where nothing is attended
    want, want_lse = reference(RoundedKeys(fmt), query.float(), clean, listed, scale, cap)
    assert out.isfinite().all()
    error = ((out - want).norm() / want.norm()).item()
    assert 1e-4 < error < ROUNDED, f"relative error of the output {error:.2e}"
    seen = want_lse.isfinite()
    assert (torch.isneginf(lse) == ~seen).all()
    assert (lse - want_lse)[seen].abs().max() < 0.01  # a key's number half-way between two of bf16 may become either


class RoundedKeys:
    """A format whose keys are read in bf16."""

    def __init__(self, fmt: Any) -> None:
        self._fmt = fmt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fmt, name)

    def unpack(self, pages: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._fmt.unpack(pages)
        return key.bfloat16().float(), value


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", IN_CPP)
def test_many_rows(name: str) -> None:
    """Rows that fill tiles, and 1, 5, 16 and 17 more; pages that begin and end anywhere; heads that must not mix."""
    for d in (64, 80, 128, 256):
        run(name, d, 4, 64, (300, 90), q=100, low=20, seed=d)
        run(name, d, 8, 32, (70,), q=150)  # 1200 rows: more than one task has
        for rows in (193, 197, 208, 209):
            run(name, d, 1, 64, (200, 64, 37, 0), q=rows, seed=rows)
    run(name, 64, 2, 32, (170, 31), q=130, heads=3, low=9, seed=3)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_a_soft_cap(cap: float) -> None:
    run("kitty2", 64, 4, 64, (300, 90), q=100, low=20, cap=cap)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("q", "dtype", "rounded"), [(16, "bfloat16", True), (15, "bfloat16", False), (16, "float16", False)]
)
def test_which_queries_meet_tiles(q: int, dtype: str, rounded: bool) -> None:
    """Numbers of other types do not fit, and few rows are left to the other kernels."""
    fmt, (query, *rest), _ = case("kivi4", 64, 4, 64, (300, 90), q, 1, 20, 0, torch.bfloat16, ())
    query = query.to(getattr(torch, dtype))
    found = [cpu.attend_packed(fmt, x, *rest)[0] for x in (query, query.float())]
    assert (not torch.equal(*found)) == rounded


@pytest.mark.usefixtures("tiles")
def test_what_is_not_attended_may_be_nan() -> None:
    """Times 0 it would still be NaN. Other formats' scales are never read as NaN."""
    fmt, (query, pool, listed, *rest), _ = case("lossless", 64, 4, 64, (50,), 100, 1, 3, 0, torch.bfloat16, ())
    before = cpu.attend_packed(fmt, query.bfloat16(), pool, listed, *rest)
    (field,) = (at for at, f in zip(fmt.slab_region.offsets, fmt.slab_region.fields, strict=True) if f.name == "v_raw")
    pool = pool.clone()
    slabs = pool[1:, :, fmt.slabs_at :].unflatten(-1, (fmt.slabs, -1))
    values = slabs[..., field : field + SLAB * 64 * 2].unflatten(-1, (SLAB, -1))
    values[:, :, 0, :3] = 0xFF
    values[:, :, 1, 50 - SLAB :] = 0xFF
    for x, y in zip(cpu.attend_packed(fmt, query.bfloat16(), pool, listed, *rest), before, strict=True):
        assert torch.equal(x, y)

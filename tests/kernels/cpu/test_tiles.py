"""Products of tiles (csrc/cpu/attend/amx): on a processor with AMX, or with tiles that are emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_fuzzing import IN_CPP
from test_cpu_attend import TOLERANCE, case, packed_pages, reference

from vllm_kvq.formats.page import HEADER_BYTES
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.kernels.build import EXTRA_FLAGS
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu import call
from vllm_kvq.kernels.cpu.library import ISAS, library

ROOT = Path(__file__).resolve().parents[3]
VNNI = ISAS.index("avx512")
EMULATED = [
    "-O1",
    "-DKVQ_EMULATED_TILES",
    "-DKVQ_LEAST_TILE_ROWS=1",
    *(f"-DKVQ_WITHOUT_{name.upper()}" for name in ISAS[1:]),
]
"""Flags of a library with tiles and the portable kernels, which compiles in seconds. Few rows meet tiles, too."""
ROUNDED = 2**-8
"""The most by which rounding weights and values to 8 bits each changes an output."""

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (library().has_tiles(VNNI) and library().has_byte_tiles(VNNI)):  # type: ignore[union-attr]
        pytest.skip("this library has no tiles here: test_with_emulated_tiles")
    monkeypatch.setattr(call, "isa", lambda: VNNI)


@pytest.mark.parametrize("lane", ["not wide", pytest.param("wide", marks=pytest.mark.wide)])
def test_with_emulated_tiles(lane: str) -> None:
    if library().has_tiles(VNNI):  # type: ignore[union-attr]
        pytest.skip("this processor has tiles: the other tests use them")
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor can't round to bf16 as those with tiles do")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not emulated", "-m", lane],
        cwd=ROOT,
        env={**os.environ, EXTRA_FLAGS: " ".join(EMULATED)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def run_many(
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
        run_many(name, d, 4, 64, (300, 90), q=100, low=20, seed=d)
        run_many(name, d, 8, 32, (70,), q=150)  # 1200 rows: more than one task has
        for rows in (193, 197, 208, 209):
            run_many(name, d, 1, 64, (200, 64, 37, 0), q=rows, seed=rows)
    run_many(name, 64, 2, 32, (170, 31), q=130, heads=3, low=9, seed=3)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_a_soft_cap(cap: float) -> None:
    run_many("kitty2", 64, 4, 64, (300, 90), q=100, low=20, cap=cap)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("q", "dtype", "rounded"), [(16, "bfloat16", True), (15, "bfloat16", False), (16, "float16", False)]
)
def test_which_queries_meet_tiles(q: int, dtype: str, rounded: bool) -> None:
    """Numbers of other types do not fit, and few rows meet tiles of bytes."""
    fmt, (query, *rest), _ = case("klt2", 64, 4, 64, (300, 90), q, 1, 20, 0, torch.bfloat16, ())
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


def run_few(
    name: str, d: int, gqa: int, N: int, lengths: tuple[int, ...], q: int = 1, low: int = 0, cap: float = 0.0,
    **options: Any,
) -> float:  # fmt: skip
    """The relative error of the output."""
    fmt, arguments, (want, want_lse) = case(
        name, d, gqa, N, lengths, q, 2, low, d + gqa, torch.bfloat16, tuple(options.items()), cap
    )
    out, lse = cpu.attend_packed(fmt, *arguments)
    assert out.isfinite().all()
    seen = want_lse.isfinite()
    assert (torch.isneginf(lse) == ~seen).all()
    assert (lse - want_lse)[seen].abs().max() <= 0.02
    return ((out - want).norm() / want.norm()).item()


FEW = [
    ("squat2", 64, 1, 64, (200, 64, 37, 0), 1, 0),
    ("squat2", 128, 7, 160, (450, 31), 1, 20),
    ("squat2", 256, 8, 32, (90,), 4, 45),
    ("kivi4", 512, 2, 64, (150,), 1, 0),
    ("kivi4", 64, 4, 64, (70,), 11, 3),
    ("kitty2", 128, 4, 64, (200, 37), 1, 20),
    ("kitty2", 64, 7, 32, (100,), 2, 0),
    ("klt2", 64, 4, 64, (200, 0, 37), 4, 20),
    ("klt3", 128, 4, 32, (100,), 1, 5),
    ("klt4", 64, 3, 64, (150,), 3, 0),
    ("innerq2", 64, 4, 64, (200, 0, 37), 1, 20),
    ("innerq2", 128, 7, 32, (200,), 2, 5),
    ("qjl3", 64, 2, 64, (100,), 1, 0),
]
"""1 to 44 rows, which fill up to six left tiles, all in part; blocks of one to four slabs."""
WIDE = [
    pytest.param(name, d, gqa, 64, (300, 64, 37, 0), q, 20, marks=pytest.mark.wide)
    for name in ("squat2", "kivi2", "kivi4", "kitty2", "klt2", "klt3", "klt4", "innerq2")
    for d in (64, 128, 256, 512)
    for gqa in (1, 2, 4, 7, 8)
    for q in (1, 4)
    if name != "innerq2" or gqa * q > 1  # one row of InnerQ meets no tiles
]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("name", "d", "gqa", "N", "lengths", "q", "low"), [*FEW, *WIDE])
def test_few_rows(name: str, d: int, gqa: int, N: int, lengths: tuple[int, ...], q: int, low: int) -> None:
    assert 1e-5 < run_few(name, d, gqa, N, lengths, q, low) <= TOLERANCE.get(name, 1e-3)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("name", "options", "served"),
    [
        ("kivi2", {"values": "raw"}, True),
        ("kivi4", {"values": "raw"}, True),
        ("kitty2", {"values": "raw", "boost": "half"}, True),
        ("innerq2", {"values": "token"}, True),
        ("innerq2", {"values": "token", "value_bits": 4, "group": 64}, True),
        ("klt2", {"key_rate": 5.0, "searched_bits": 4}, True),
        ("innerq2", {"values": "raw"}, True),
        ("qjl3", {"values": "innerq"}, True),
        ("innerq2", {"key_bits": 4, "value_bits": 4}, False),
        ("polar4", {"values": "raw"}, False),
    ],
)
def test_which_halves_meet_tiles(name: str, options: dict[str, Any], served: bool) -> None:
    """Only keys or only values meet tiles: VNNI's kernels serve the others, and without them those in float32."""
    error = run_few(name, 128, 4, 64, (100, 70), **options)
    if "-DKVQ_WITHOUT_AVX512" in os.environ.get(EXTRA_FLAGS, "").split():
        assert error <= 1e-3
        assert (error > 1e-5) == served
    else:  # VNNI's have their own tolerance for QJL's keys
        assert error <= TOLERANCE.get(name, 1e-3)


@pytest.mark.usefixtures("tiles")
def test_a_soft_cap_of_few_rows() -> None:
    assert 1e-5 < run_few("kitty2", 64, 4, 64, (300, 90), 2, 20, cap=2.0) <= 1e-3


@pytest.mark.usefixtures("tiles")
def test_parameters_of_tokens_that_are_not_attended_may_be_nan() -> None:
    fmt, (query, pool, listed, *rest), _ = case("squat2", 64, 4, 64, (50,), 1, 1, 3, 0, torch.bfloat16, ())
    before = cpu.attend_packed(fmt, query, pool, listed, *rest)
    pool = pool.clone()
    size = fmt.slab_region.nbytes
    slabs = pool[1:, :, fmt.slabs_at : fmt.slabs_at + fmt.slabs * size].unflatten(-1, (-1, size))
    for at, field in zip(fmt.slab_region.offsets, fmt.slab_region.fields, strict=True):
        if field.name in ("v_scale", "v_zero"):
            halves = slabs[..., at : at + field.nbytes].unflatten(-1, (-1, SLAB, 2))
            halves[:, :, 0, :, :3] = 0xFF
            halves[:, :, 1, :, 50 - SLAB :] = 0xFF
    for x, y in zip(cpu.attend_packed(fmt, query, pool, listed, *rest), before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("tiles")
def test_pages_with_other_norms() -> None:
    """A block of slabs from pages of which some neighbours have the same norm (InnerQ), as where a prefix is shared."""
    fmt, (query, pool, listed, *rest), _ = case("innerq2", 64, 4, 32, (290,), 1, 1, 3, 0, torch.bfloat16, ())
    pool = pool.clone()
    ((at, field),) = (
        x for x in zip(fmt.page_region.offsets, fmt.page_region.fields, strict=True) if "norm" in x[1].name
    )
    at += HEADER_BYTES
    norms = pool[listed.ids, :, at : at + field.nbytes].view(torch.float16)
    factors = torch.tensor([1, 2, 2, 0.5, 0.5, 0.5, 2, 1, 0.5, 2], dtype=torch.float16)
    pool[listed.ids, :, at : at + field.nbytes] = (norms * factors[:, None, None]).view(torch.uint8)
    want, _ = reference(fmt, query, pool, listed, *rest)
    out, _ = cpu.attend_packed(fmt, query, pool, listed, *rest)
    assert 1e-5 < (out - want).norm() / want.norm() < 1e-3

"""Keys with constants of their own for each KV head (formats/methods/klt.py), as the C++ kernels get them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_fuzzing import IN_CPP

from vllm_kvq.bench.pools import calibrated, outlier_data, random_pages
from vllm_kvq.formats import FORMATS, Geometry, PageFormat, get_format
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.constants import Constants
from vllm_kvq.formats.methods.klt import BITS, RATE
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu import layout
from vllm_kvq.kernels.cpu import pack as cpu_pack
from vllm_kvq.kernels.cpu.library import ISAS, library
from vllm_kvq.kernels.torch.lists import PageList
from vllm_kvq.kernels.torch.pack import Units

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
TRANSFORMED = [name for name in IN_CPP if FORMATS[name].keys.calibrated]
H, D, N = 2, 64, 64
ZERO = torch.zeros(1, dtype=torch.int64)
FIRST = 70_016
"""The position of the page's first token."""


def bound(name: str, d: int = D, **options: Any) -> PageFormat:
    return get_format(name).bind(Geometry(d, N, torch.float32), options)


def attended(fmt: PageFormat, pages: torch.Tensor, q: int = 1) -> torch.Tensor:
    query = torch.randn(1, q, 2 * pages.shape[1], D, generator=torch.Generator().manual_seed(0))
    return cpu.attend_packed(fmt, query, pages, PageList(ZERO + 1, ZERO, ZERO, ZERO + N), D**-0.5)[0]


def packed(fmt: PageFormat) -> torch.Tensor:
    key, value = (x.transpose(0, 1).contiguous() for x in outlier_data(N, H, D, 0))
    none = ZERO.repeat(2)
    unit = torch.arange(2)
    units = Units(none + 1, unit, torch.arange(N).view(2, 32), none, none > 0, FIRST + 32 * unit)
    pages = torch.zeros(2, H, fmt.record_bytes, dtype=torch.uint8)
    cpu_pack.pack(fmt, pages, units, (key[:0].unsqueeze(1), value[:0].unsqueeze(1)), (key, value), None)
    return pages


@pytest.mark.parametrize("name", TRANSFORMED)
def test_constants_of_other_heads_are_refused(name: str) -> None:
    """So is having none at all: a format can be asked about before its constants are there, but serves nothing."""
    pages = random_pages(calibrated(bound(name), H), 1, H)
    for other, heads in ((bound(name), 0), (calibrated(bound(name), 1), 1), (calibrated(bound(name), 3), 3)):
        assert layout.bind(other) is not None
        for call in (attended, cpu.all_packed):
            arguments = (pages, PageList(ZERO, ZERO, ZERO, ZERO)) if call is cpu.all_packed else (pages,)
            with pytest.raises(ValueError, match=f"constants of {heads} KV heads, but pages have 2"):
                call(other, *arguments)
        with pytest.raises(ValueError, match=f"constants of {heads} KV heads"):
            packed(other)


def test_without_constants_tables_are_float32() -> None:
    """Even while vLLM makes layers, when the default dtype is the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert layout.bind(bound("klt3")) is not None
    finally:
        torch.set_default_dtype(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("q", [1, 300])
def test_each_head_has_its_own(q: int) -> None:
    """The heads' constants in the other order are those of other keys, for few rows and for many."""
    fmt = calibrated(bound("klt3"), H)
    assert fmt.geometry.constants is not None
    keys = fmt.geometry.constants.keys
    assert keys is not None
    swapped = fmt.with_constants(Constants(keys.flip(0), None))
    pages = packed(fmt)
    assert not torch.equal(packed(swapped), pages)
    got = attended(fmt, pages, q).unflatten(2, (H, -1))
    other = attended(swapped, pages, q).unflatten(2, (H, -1))
    assert (other - got).flatten(3).norm(dim=-1).amin() > 0.01
    # a head by itself, with its own constants, gives what it gives among others
    for head in range(H):
        one = fmt.with_constants(Constants(keys[head : head + 1], None))
        alone = cpu.attend_packed(
            one,
            torch.randn(1, q, 2 * H, D, generator=torch.Generator().manual_seed(0))[:, :, 2 * head : 2 * head + 2],
            pages[:, head : head + 1],
            PageList(ZERO + 1, ZERO, ZERO, ZERO + N),
            D**-0.5,
        )[0]
        assert (alone - got[:, :, head]).norm() <= 1e-3 * alone.norm()


@pytest.mark.parametrize(("row", "bad", "what"), [(0, D, "channel"), (0, -1, "channel"), (1, 32, "shift")])
def test_slots_outside_the_channels_are_refused(monkeypatch: pytest.MonkeyPatch, row: int, bad: int, what: str) -> None:
    fmt = calibrated(bound("klt2"), H)
    real = layout.KEYS[type(fmt.keys)]

    def broken(codec: Any) -> dict[str, Any]:
        assert real.tables is not None
        tables = real.tables(codec)
        tables["places"][H - 1, row, -1] = bad
        return tables

    monkeypatch.setitem(layout.KEYS, type(fmt.keys), replace(real, tables=broken))
    with pytest.raises(IndexError, match=f"{what} {bad} is not one of"):
        packed(fmt)


@pytest.mark.parametrize("bits", BITS.choices)
@pytest.mark.parametrize("rate", [1.0, 2.5, 4.0, 5.0])
def test_which_halves_have_integer_kernels(isa: int, bits: int, rate: float) -> None:
    """Keys of all head sizes, up to 1024 slots of a token, and all values."""
    for d in HEAD_SIZES:
        fmt = bound("klt2", d, **{RATE.name: rate, BITS.name: bits})
        found = int(library().integer_halves(layout.bind(fmt), isa))  # type: ignore[union-attr]
        assert found == (0 if ISAS[isa] == "portable" else (fmt.keys.slots <= 1024) + 2), d  # type: ignore[attr-defined]

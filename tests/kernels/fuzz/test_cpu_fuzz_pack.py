"""Random tokens, lists and states through everything in C++ that writes: pack, store, fit. No byte outside the listed
units or rows changes, tokens that nobody lists may hold anything, and an index that leaves its tensor is refused
before anything is written. `test_cpu_sanitizers.py` runs this file under the address sanitizer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_fuzzing import CASES, WILD, bound, fuzz, shapes, thorough_fuzz
from hypothesis import given
from hypothesis import strategies as st
from one_each import METHODS

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.page import POSITION_AT
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu import pack as cpu_pack
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.torch import attend as reference_attend
from vllm_kvq.kernels.torch import pack as reference
from vllm_kvq.kernels.torch.lists import PageList
from vllm_kvq.kernels.torch.pack import Pair, Units

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("isa"),
]

FLOATS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, wild: float, rng: torch.Generator) -> torch.Tensor:
    """Normal numbers, a share of which is replaced by arbitrary bits: NaN, infinities, subnormal and huge numbers."""
    x = torch.randn(shape, generator=rng).to(dtype)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    top = torch.iinfo(whole)
    bits = torch.randint(top.min, top.max + 1, shape, generator=rng).to(whole)
    return torch.where(torch.rand(shape, generator=rng) < wild, bits.view(dtype), x)


def raw_tokens(
    shape: tuple[int, ...], heads: int, d: int, dtype: torch.dtype, wild: float, rng: torch.Generator
) -> Pair:
    """Keys and values (*shape, heads, d) as strided views of one allocation that ends where the last value ends."""
    both = any_bits((*shape, 2, heads, d), dtype, wild, rng)
    return both[..., 0, :, :], both[..., 1, :, :]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def listed(fmt: PageFormat, pages: int, limit: int, owners: int, data: st.DataObject, rng: torch.Generator) -> Units:
    """Some units, sorted by page, with any rows."""
    per_page = fmt.N // fmt.unit
    every = torch.arange(pages * per_page)
    some = every[torch.rand(len(every), generator=rng) < data.draw(st.sampled_from([0.3, 1.0]))]
    page, unit, count = some // per_page, some % per_page, len(some)
    rows = torch.randint(0, limit, (count, fmt.unit), generator=rng)
    owner = torch.randint(0, owners, (count,), generator=rng)
    # anywhere, but neighbours in a page are neighbours
    position = torch.randint(1 << 20, (pages,), generator=rng)[page] * fmt.N + unit * fmt.unit
    return Units(page, unit, rows, owner, torch.rand(count, generator=rng) < 0.3, position)


@pytest.mark.parametrize("case", CASES, ids=str)
@fuzz
@given(data=st.data())
def test_pack(case: tuple[str, Any], data: st.DataObject) -> None:
    s = shapes(data.draw, case)
    dtype = data.draw(FLOATS)
    fmt = bound(*case, s["d"], s["N"], dtype, s["heads"])
    rng = torch.Generator().manual_seed(s["seed"])
    heads, d, pages = s["heads"], s["d"], s["pages"]
    wild = data.draw(st.sampled_from([0.0, 0.01, 1.0]))
    blocks, slots, fresh, owners = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5)), s["listed"] + 1, 2
    old = raw_tokens((blocks, slots), heads, d, dtype, wild, rng)
    new = raw_tokens((fresh,), heads, d, dtype, wild, rng)
    state = None
    if fmt.state_rows:
        state = any_bits((owners, heads, fmt.state_rows, fmt.geometry.d), torch.float32, wild, rng)
    limit = blocks * slots + fresh
    units = listed(fmt, pages, limit, owners, data, rng)
    pool = torch.randint(0, 256, (pages + 2, heads, fmt.record_bytes), dtype=torch.uint8, generator=rng)
    before, mine = pool.clone(), pool[1:-1]

    bad = data.draw(st.sampled_from(["", "", "page", "unit", "rows", "owner"]))
    if bad and len(units.page) and (bad != "owner" or state is not None):
        column = getattr(units, bad).clone()
        column[-1] = data.draw(WILD)
        with pytest.raises(IndexError):
            cpu_pack.pack(fmt, mine, replace(units, **{bad: column}), old, new, state)
        assert torch.equal(pool, before)
        return

    lost = cpu_pack.pack(fmt, mine, units, old, new, state)
    tokens = [reference.gather(a, b.unsqueeze(1), units.rows) for a, b in zip(old, new, strict=True)]
    assert lost == sum(int(fmt.widen(x)[1]) for x in tokens)
    ours = torch.zeros(len(pool), fmt.record_bytes, dtype=torch.bool)
    slabs = fmt.unit // 32
    for page, unit in zip((units.page + 1).tolist(), units.unit.tolist(), strict=True):
        flags = slice(16 + unit * slabs, 16 + (unit + 1) * slabs)
        assert pool[page, :, flags].eq(1).all()
        ours[page, :4] = ours[page, flags] = True
        if fmt.placed:
            ours[page, POSITION_AT : POSITION_AT + 4] = True
        ours[page, fmt.slabs_at - fmt.page_region.nbytes : fmt.slabs_at] = True
        start = fmt.slabs_at + unit * slabs * fmt.slab_region.nbytes
        ours[page, start : start + slabs * fmt.slab_region.nbytes] = True
    assert torch.equal(pool.masked_fill(ours[:, None], 0), before.masked_fill(ours[:, None], 0))

    # what no unit lists is not read
    unlisted = torch.ones(limit, dtype=torch.bool)
    unlisted[units.rows.flatten()] = False
    for a, b in zip(old, new, strict=True):
        a[unlisted[: blocks * slots].view(blocks, slots)] = torch.nan
        b[unlisted[blocks * slots :]] = torch.nan
    again = before.clone()
    assert cpu_pack.pack(fmt, again[1:-1], units, old, new, state) == lost
    assert torch.equal(again, pool)


@thorough_fuzz
@given(data=st.data())
def test_store(data: st.DataObject) -> None:
    s = shapes(data.draw)
    dtype = data.draw(FLOATS)
    rng = torch.Generator().manual_seed(s["seed"])
    heads, d, blocks, slots = s["heads"], s["d"], s["pages"], data.draw(st.integers(1, 9))
    pool = raw_tokens((blocks + 2, slots), heads, d, dtype, 0.5, rng)
    new = raw_tokens((s["listed"] + 1,), heads, d, dtype, 0.5, rng)
    count = data.draw(st.integers(0, blocks * slots))
    rows = torch.randperm(blocks * slots, generator=rng)[:count]
    source = torch.randint(0, len(new[0]), (count,), generator=rng)
    before = [as_bytes(x) for x in pool]
    mine = pool[0][1:-1], pool[1][1:-1]
    bad = data.draw(st.sampled_from(["", "", "rows", "source"]))
    if bad and count:
        (rows if bad == "rows" else source)[-1] = data.draw(WILD)
        with pytest.raises(IndexError):
            cpu_pack.store(mine, rows, new, source)
        assert all(torch.equal(as_bytes(x), y) for x, y in zip(pool, before, strict=True))
        return
    want = [x.clone() for x in pool]
    reference.store((want[0][1:-1], want[1][1:-1]), rows, new, source)
    cpu_pack.store(mine, rows, new, source)
    assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(pool, want, strict=True))


@pytest.mark.parametrize("name", [n for n in METHODS if bound(n, (), 64, 64).state_rows])
@fuzz
@given(data=st.data())
def test_fit(name: str, data: st.DataObject) -> None:
    """Any bits, any number of tokens, with and without history: finite, and what the reference finds."""
    s = shapes(data.draw, (name, ()))
    dtype = data.draw(FLOATS)
    fmt = bound(name, (), s["d"], 64, dtype)
    rng = torch.Generator().manual_seed(s["seed"])
    heads, d, tokens = s["heads"], s["d"], data.draw(st.integers(1, 300))
    wild = data.draw(st.sampled_from([0.0, 0.01, 1.0]))
    query = any_bits((tokens, heads * s["group"], d + 16), dtype, wild, rng)[..., :d]
    key, _ = raw_tokens((tokens,), heads, d, dtype, wild, rng)
    state = None
    for part in range(data.draw(st.integers(1, 2))):
        q, k = (x[part * tokens // 2 :] for x in (query, key))
        got, want = cpu_pack.fit(fmt, q, k, state), reference.fit(fmt, q, k, state)
        assert got.isfinite().all()
        if name == "innerq2":
            assert torch.equal(got, want)
        elif name == "qjl3":
            assert torch.allclose(got, want, rtol=1e-5)
        else:  # the subspace is arbitrary if singular values are equal; its energy is not
            energy = [x.double().square().sum((1, 2)) for x in (got, want)]
            assert torch.allclose(*energy, rtol=1e-4)
        state = want


@pytest.mark.parametrize("case", CASES[:2], ids=str)
@fuzz
@given(data=st.data())
def test_all_packed(case: tuple[str, Any], data: st.DataObject) -> None:
    s = shapes(data.draw, case)
    fmt = bound(*case, s["d"], s["N"])
    rng = torch.Generator().manual_seed(s["seed"])
    pages = torch.zeros(s["pages"], s["heads"], fmt.record_bytes, dtype=torch.uint8)
    flags = torch.rand(s["pages"], fmt.slabs, generator=rng) < 0.9
    magic = torch.tensor([0x3151564B], dtype=torch.int32).view(torch.uint8)
    pages[torch.rand(s["pages"], generator=rng) < 0.9, :, :4] = magic
    pages[:, :, 16 : 16 + fmt.slabs] = flags[:, None].to(torch.uint8)
    count = s["listed"]
    ids = torch.randint(0, s["pages"], (count,), generator=rng)
    low = torch.randint(-5, fmt.N, (count,), generator=rng)
    high = low + torch.randint(1, fmt.N, (count,), generator=rng)
    if count and data.draw(st.booleans()):
        ids[-1] = data.draw(WILD)
        with pytest.raises(IndexError):
            cpu.all_packed(fmt, pages, PageList(ids, ids, low, high))
        return
    want = reference_attend.all_packed(fmt, pages, PageList(ids, ids, low, high.clamp_min(0)))
    assert cpu.all_packed(fmt, pages, PageList(ids, ids, low, high)) == want

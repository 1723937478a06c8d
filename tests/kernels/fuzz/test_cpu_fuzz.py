"""Random pages, lists and ranges through every C++ decoder: nothing outside the tensors is read, and nothing that is
not attended matters. `test_cpu_sanitizers.py` runs this file under the address sanitizer.

To run more examples than the suite does (per test):

    KVQ_FUZZ_EXAMPLES=1000 python -m proof sanitize address,undefined -- \
        python -m pytest tests/kernels/fuzz/test_cpu_fuzz.py tests/kernels/fuzz/test_cpu_fuzz_pack.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_fuzzing import CASES, WILD, bound, fuzz, shapes, thorough_fuzz
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.page import POSITION_AT
from vllm_kvq.formats.parts.fields import Field
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.scales import LARGEST
from vllm_kvq.kernels.cpu.call import scores, team
from vllm_kvq.kernels.cpu.layout import bind
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.tuples import Held, Output, Part
from vllm_kvq.kernels.torch.lists import PageList

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


def attend(fmt: PageFormat, isa: int, threads: int, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu.attend_packed`, with a chosen instruction set and number of threads."""
    query, pages, *lists = arguments
    n, q, heads, head_size = query.shape
    out, lse = torch.full((n, q, heads, head_size), 7.0), torch.full((n, q, heads), 7.0)
    listed, at = PageList(*(torch.tensor(x, dtype=torch.int64) for x in lists)), scores(head_size**-0.5, 0.0)
    library().attend_packed(bind(fmt), query, pages, listed, at, Part(out, lse), team(threads, isa))
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
@fuzz
@given(data=st.data())
def test_any_bytes_any_lists(isa: int, case: tuple[str, Any], data: st.DataObject) -> None:
    """Only what the lists name is read; a page or an owner that does not exist is refused."""
    s = shapes(data.draw, case)
    fmt = bound(*case, s["d"], s["N"], heads=s["heads"])
    rng = torch.Generator().manual_seed(s["seed"])
    # the pool ends where its last record ends, so that a sanitizer sees the first byte too many
    pages = torch.randint(0, 256, (s["pages"], s["heads"], fmt.record_bytes), dtype=torch.uint8, generator=rng)
    fill = data.draw(st.sampled_from([None, 0x00, 0x7C, 0xFF]))
    if fill is not None:
        pages[torch.rand(pages.shape, generator=rng) < 0.9] = fill
    query = torch.randn(s["requests"], s["q"], s["heads"] * s["group"], s["d"], generator=rng)

    def some(valid: st.SearchStrategy[int], wild: bool) -> list[int]:
        return [data.draw(st.one_of(valid, WILD) if wild else valid) for _ in range(s["listed"])]

    bad = data.draw(st.sampled_from(["", "", "ids", "owner"]))
    ids = some(st.integers(0, s["pages"] - 1), bad == "ids")
    owner = some(st.integers(0, s["requests"] - 1), bad == "owner")
    low, high = (some(st.integers(-5, s["N"] + 5), True) for _ in range(2))
    arguments = fmt, isa, s["threads"], query, pages, ids, owner, low, high
    if not all(0 <= i < s["pages"] for i in ids) or not all(0 <= o < s["requests"] for o in owner):
        with pytest.raises(IndexError):
            attend(*arguments)
        return
    out, lse = attend(*arguments)
    for r in range(s["requests"]):
        seen = any(max(a, 0) < min(b, s["N"]) for a, b, o in zip(low, high, owner, strict=True) if o == r)
        if not seen:
            assert not out[r].any()
            assert torch.isneginf(lse[r]).all()


def plausible(field: Field, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """What a field may hold: any codes, finite parameters."""
    if field.dtype == torch.uint8:
        first, end = (1, LARGEST + 1) if field.name.endswith("scale") else (0, 256)
        return torch.randint(first, end, shape, dtype=torch.uint8, generator=rng)
    x = torch.randn(shape, generator=rng)
    if field.dtype == torch.int32:  # InnerQ's slots: the bits of a float, or signs
        return x.view(torch.int32)
    if field.name.endswith("scale") and len(field.shape) > 1:
        return x
    return x.abs() if field.name.endswith(("norm", "step")) else x


def spoil_token(field: Field, at: torch.Tensor, t: int) -> None:
    """All bytes that belong only to token t. `at` is the field's bytes (heads, nbytes)."""
    view = at.unflatten(-1, (*field.shape, field.dtype.itemsize))
    if field.name in ("v_codes", "v_high"):  # [8 token quads][channels][4 tokens]
        view[:, t // 4, :, t % 4] = 0xFF
    elif field.name == "v_raw":
        view[:, t] = 0xFF
    elif field.dtype == torch.uint8 and len(field.shape) == 3:  # [quads][32 tokens][4]
        view[:, :, t] = 0xFF
    elif field.shape[-1] == SLAB:  # parameters per token
        view[..., t, :] = 0xFF


@pytest.mark.parametrize("case", CASES, ids=str)
@fuzz
@given(data=st.data())
def test_bytes_of_unattended_tokens_change_no_bit(isa: int, case: tuple[str, Any], data: st.DataObject) -> None:
    s = shapes(data.draw, case)
    fmt = bound(*case, s["d"], s["N"], heads=s["heads"])
    rng = torch.Generator().manual_seed(s["seed"])
    count, heads = s["pages"], s["heads"]
    pages = torch.randint(0, 256, (count, heads, fmt.record_bytes), dtype=torch.uint8, generator=rng)
    page, slab = fmt.page_region, fmt.slab_region
    for region, at, times in ((page, fmt.slabs_at - page.nbytes, 1), (slab, fmt.slabs_at, fmt.slabs)):
        for i in range(times):
            values = {f.name: plausible(f, (count, heads, *f.shape), rng) for f in region.fields}
            start = at + i * region.nbytes
            region.write(pages[..., start : start + region.nbytes], values)
    low = [data.draw(st.integers(0, s["N"] - 1)) for _ in range(count)]
    high = [data.draw(st.integers(a + 1, s["N"])) for a in low]
    query = torch.randn(1, s["q"], heads * s["group"], s["d"], generator=rng)
    lists = list(range(count)), [0] * count, low, high
    before = attend(fmt, isa, s["threads"], query, pages, *lists)
    assert all(x.isfinite().all() for x in before)
    header = pages[..., : fmt.slabs_at - page.nbytes].clone()
    pages[..., : fmt.slabs_at - page.nbytes] = 0xFF  # flags, for other readers
    if fmt.placed:
        position = slice(POSITION_AT, POSITION_AT + 4)
        pages[..., position] = header[..., position]
    for p in range(count):
        for i in range(fmt.slabs):
            start = fmt.slabs_at + i * slab.nbytes
            tokens = [t for t in range(SLAB) if not low[p] <= i * SLAB + t < high[p]]
            if len(tokens) == SLAB:
                pages[p, :, start : start + slab.nbytes] = 0xFF
                continue
            for f, o in zip(slab.fields, slab.offsets, strict=True):
                for t in tokens:
                    spoil_token(f, pages[p, :, start + o : start + o + f.nbytes], t)
    after = attend(fmt, isa, s["threads"], query, pages, *lists)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@thorough_fuzz
@given(data=st.data())
def test_any_rows_of_full_precision_tokens(isa: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """attend_into: absent rows are skipped, rows beyond the pools refused, NaN in rows that nobody sees is harmless."""
    s = shapes(data.draw)
    rng = torch.Generator().manual_seed(s["seed"])
    blocks, slots, t = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 40))
    more = data.draw(st.integers(0, 3))
    sizes = (blocks, slots), (more, 1)
    pools = [[torch.randn(*n, s["heads"], s["d"], generator=rng).to(dtype) for _ in range(2)] for n in sizes]
    query = torch.randn(s["requests"], s["q"], s["heads"] * s["group"], s["d"], generator=rng).to(dtype)
    seen = torch.rand(s["requests"], s["q"], t, generator=rng) < 0.5
    limit = blocks * slots + more
    rows = torch.randint(-2, limit, (s["requests"], t), generator=rng)
    if t and data.draw(st.booleans()):
        rows[-1, -1] = data.draw(WILD)
    n, q, query_heads, d = query.shape
    out, lse = torch.full((n * q, query_heads, d), 7.0), torch.full((n, q, query_heads), 7.0)
    held = Held(*pools[0], *pools[1], rows, seen.view(torch.uint8))
    how, by = scores(d**-0.5, data.draw(st.sampled_from([0.0, 5.0]))), team(s["threads"], isa)
    arguments = query, held, how, (), Output(out, torch.arange(n * q)), lse, by
    if t and int(rows.max()) >= limit:
        with pytest.raises(IndexError):
            library().attend_raw(*arguments)
        return
    there = seen & (rows >= 0)[:, None]
    wanted = set(rows[there.any(1)].tolist())
    for row in set(range(limit)) - wanted:
        first = row < blocks * slots
        for x in pools[0 if first else 1]:
            x.flatten(0, 1)[row if first else row - blocks * slots] = torch.nan
    library().attend_raw(*arguments)
    assert out.isfinite().all()
    assert (torch.isneginf(lse) == ~there.any(-1, keepdim=True)).all()

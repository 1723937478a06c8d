"""The very source of the CUDA kernels, compiled for the CPU, against float64 attention over the same codes.

Covered: fragment layouts, unpacking, softmax, merges, index checks, addresses in range and aligned, collectives that
all lanes reach, data read before its asynchronous copy was waited for. Not covered: the hardware's memory model and
timing, races that the emulation's order of lanes does not show, and nvcc's own work.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from proof.kernels.exact import exact_attention, relative_error
from proof.kernels.packing import pack_like_a_step
from vllm_kvq.bench.pools import outlier_data, random_pages
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.page import FLAGS_AT
from vllm_kvq.kernels.gpu import cuda
from vllm_kvq.kernels.gpu.cuda import CUDA
from vllm_kvq.kernels.gpu.paged import PackSource, PageTable, Ragged, merge_parts
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.lists import PageList

BOUND = 2e-3
LSE_BOUND = 4e-3
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@functools.cache
def pool(d: int, n: int, pages: int = 4, heads: int = 2, sketch: str = "orthogonal") -> tuple[PageFormat, torch.Tensor]:
    """Every slab has different outlier channels."""
    fmt = get_format("qjl3").bind(Geometry(d, n), {"outlier_choice": "slab", "sketch": sketch})
    pages_ = random_pages(fmt, pages, heads)
    sets = fmt.read(pages_, torch.arange(1, pages + 1))["ko_index"].flatten(0, 1).unique(dim=0)
    assert len(sets) > heads
    return fmt, pages_


def queries(n: int, q: int, heads: int, d: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(n, q, heads, d, generator=torch.Generator().manual_seed(3)).to(dtype)


def check(fmt: PageFormat, pages: torch.Tensor, query: torch.Tensor, table, low, high, splits: int | None) -> None:
    scale = fmt.geometry.head_size**-0.5
    out, lse = CUDA.attend_table(fmt, query, pages, table, low, high, scale, splits)
    want, want_lse = exact_attention(fmt, query, pages, table, low, high, scale)
    assert out.dtype == lse.dtype == F32
    assert relative_error(out, want) < BOUND
    empty = want_lse == -torch.inf
    assert (lse[empty] == -torch.inf).all()
    assert (out[empty] == 0).all()
    assert (lse.double() - want_lse)[~empty].abs().max() < LSE_BOUND


@pytest.mark.parametrize(
    ("d", "share", "n", "dtype", "q"),
    [
        (64, 1, 32, F32, 1),
        (64, 4, 64, BF16, 3),
        (64, 7, 96, F16, 1),
        (128, 1, 64, F16, 1),
        (128, 4, 128, BF16, 1),
        (128, 8, 64, F32, 2),
        (128, 5, 32, BF16, 1),
        (256, 2, 64, F32, 1),
        (256, 16, 128, BF16, 1),
        (256, 4, 96, F16, 5),
    ],
)
def test_against_float64(d: int, share: int, n: int, dtype: torch.dtype, q: int) -> None:
    fmt, pages = pool(d, n)
    table = torch.tensor([[3, 1, 2], [4, 0, 0]], dtype=torch.int32)
    low, high = torch.tensor([5, 0]), torch.tensor([2 * n + 17, 19])
    check(fmt, pages, queries(2, q, 2 * share, d, dtype), table, low, high, splits=2)


def test_independent_rows_are_only_other_numbers() -> None:
    fmt, pages = pool(64, 64, sketch="gaussian")
    table = torch.tensor([[3, 1, 2], [4, 0, 0]], dtype=torch.int32)
    low, high = torch.tensor([5, 0]), torch.tensor([145, 19])
    check(fmt, pages, queries(2, 1, 4, 64), table, low, high, splits=2)


@pytest.mark.parametrize("splits", [1, 3, 16])
def test_ragged_lengths_and_empty_splits(splits: int) -> None:
    fmt, pages = pool(64, 64)
    table = torch.tensor([[1, 2, 3, 4], [2, -1, 99, 0], [4, 3, 0, 0], [0, 0, 0, 0], [1, 3, 4, 0]], dtype=torch.int64)
    low = torch.tensor([0, 0, 64, 0, 31], dtype=torch.int32)
    high = torch.tensor([256, 1, 65, 0, 160], dtype=torch.int32)
    check(fmt, pages, queries(5, 1, 4, 64), table, low, high, splits)


def test_pages_out_of_range_and_unpacked_slabs_are_not_seen() -> None:
    """Page 0 is NaN throughout, ids point nowhere (the emulation fails on any read there), a slab's flag is missing."""
    fmt, good = pool(64, 64)
    pages = good.clone()
    slab = fmt.slabs_at + fmt.slab_region.nbytes
    pages[2, :, slab : slab + fmt.slab_region.nbytes] = 0xFF
    pages[2, :, FLAGS_AT + 1] = 0
    query = queries(2, 1, 4, 64)
    table = torch.tensor([[1, 2, 0, -7, 1 << 30], [0, -1, 5, 5, 5]], dtype=torch.int32)
    low, high = torch.zeros(2, dtype=torch.int32), torch.tensor([320, 10_000], dtype=torch.int32)
    out, lse = CUDA.attend_table(fmt, query, pages, table, low, high, 0.125, splits=3)
    seen = exact_attention(fmt, query[:1], good, table[:1], low[:1], torch.tensor([96]), 0.125)
    assert relative_error(out[0], seen[0][0]) < BOUND
    assert torch.isneginf(lse[1]).all()
    assert (out[1] == 0).all()


def test_one_set_of_outlier_channels_and_a_change_of_it() -> None:
    """The usual case, slabs that share their outliers, and a page in between that has others."""
    fmt, pages = pool(128, 64)
    key, value = outlier_data(3 * 64, 2, 128, 5)
    mine = torch.cat([torch.zeros(1, 2, fmt.record_bytes, dtype=torch.uint8), pages[1:2], pages[1:2], pages[1:2]])
    energies = key.square().sum(1).clone()
    state = torch.stack([energies, torch.full_like(energies, 192)], 1).repeat(2, 1, 1)
    prompt = get_format("qjl3").bind(fmt.geometry)
    for page, first in ((1, 0), (3, 128)):
        units = (x[:, first : first + 64].unflatten(1, (2, 32)).transpose(0, 1).flatten(0, 1) for x in (key, value))
        prompt.write(mine, torch.tensor([page] * 2), torch.arange(2), prompt.pack(*units, state))
    at = fmt.slabs_at + fmt.slab_region.offset("ko_index")
    sets = [mine[p, 0, at : at + 8].tolist() for p in (1, 2, 3)]
    assert sets[0] == sets[2] != sets[1]
    table = torch.tensor([[1, 3, 2, 1]], dtype=torch.int32)
    check(fmt, mine, queries(1, 1, 8, 128), table, torch.tensor([0]), torch.tensor([250]), splits=1)


def test_list_of_pages_as_the_reference_takes_it() -> None:
    fmt, pages = pool(64, 64)
    query = queries(3, 2, 4, 64)
    ids, owner = torch.tensor([1, 4, 2, 3]), torch.tensor([0, 0, 0, 2])
    listed = PageList(ids, owner, torch.tensor([0, 3, 0, 60]), torch.tensor([64, 40, 0, 64]))
    got = CUDA.attend_packed(fmt, query, pages, listed, 0.125)
    want = attend.attend_packed(fmt, query, pages, listed, 0.125)
    assert relative_error(got[0], want[0].double()) < BOUND
    assert torch.equal(torch.isneginf(got[1]), torch.isneginf(want[1]))


def test_requests_of_different_numbers_of_queries() -> None:
    """As in a step of vLLM: tokens one after the other, their starts on the device, one padded request."""
    fmt, pages = pool(64, 64)
    query = queries(1, 9, 4, 64)
    start = torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    table = torch.tensor([[1, 2, 0], [0, 0, 0], [3, 4, 1]], dtype=torch.int32)
    low, high = torch.zeros(3, dtype=torch.int32), torch.tensor([100, 0, 190], dtype=torch.int32)
    out, lse = torch.full((2, 9, 4, 64), torch.nan), torch.full((2, 9, 4), torch.nan)
    CUDA.launch_attend(fmt, query, pages, PageTable(table, low, high), (out, lse), 0.125, ragged=Ragged(start, 5))
    assert torch.isnan(out[:, 6:]).all()
    got, got_lse = merge_parts(out[:, :6].contiguous(), lse[:, :6].contiguous())
    for i in (0, 2):
        at = slice(int(start[i]), int(start[i + 1]))
        want, want_lse = exact_attention(fmt, query[:, at], pages, table[i : i + 1], low[:1], high[i : i + 1], 0.125)
        assert relative_error(got[at], want[0]) < BOUND
        assert (got_lse[at].double() - want_lse[0]).abs().max() < LSE_BOUND


def test_extreme_queries_stay_finite() -> None:
    fmt, pages = pool(64, 64)
    table, low, high = torch.tensor([[1, 2]]), torch.tensor([0]), torch.tensor([128])
    for magnitude in (1e-4, 30.0):
        query = magnitude * queries(1, 1, 2, 64)
        out, lse = CUDA.attend_table(fmt, query, pages, table, low, high, 0.125)
        want, want_lse = exact_attention(fmt, query, pages, table, low, high, 0.125)
        assert relative_error(out, want) < BOUND * max(1.0, magnitude)
        assert (lse - want_lse).abs().max() <= 1e-3 * max(1.0, float(want_lse.abs().max()))


@pytest.mark.parametrize(
    ("d", "n", "dtype", "state", "sketch"),
    [
        (64, 64, F32, False, "orthogonal"),
        (128, 32, BF16, True, "orthogonal"),
        (256, 64, F16, False, "orthogonal"),
        (64, 64, F32, True, "gaussian"),
    ],
)
def test_packed_bytes_agree_but_for_rounding(d: int, n: int, dtype: torch.dtype, state: bool, sketch: str) -> None:
    """A float32 sum in another order flips the sign of a product near zero, or a norm's last bit, now and then."""
    fmt = get_format("qjl3").bind(Geometry(d, n, dtype), {"sketch": sketch})
    key, value = (x.transpose(0, 1).to(dtype).contiguous() for x in outlier_data(128, 2, d, 0))
    key[43, 0, 5], value[74, 1, 6] = torch.nan, torch.inf
    prompt = None
    if state:
        wide = fmt.widen(key)[0].transpose(0, 1)
        prompt = fmt.keys.fit(wide, wide, None)
    # 40 tokens in the ring, 83 new ones: slab 1 from both, slab 2 from the step, slab 3 is not complete
    got, replaced = pack_like_a_step(CUDA, fmt, key[:123], value[:123], 40, prompt, "cpu")
    assert replaced == 2
    rows = torch.arange(32, 96).view(2, 32)
    page, slab = 1 + rows[:, 0] // n, rows[:, 0] % n // 32
    want = torch.zeros_like(got)
    by_head = (fmt.widen(x[rows])[0].transpose(1, 2).flatten(0, 1) for x in (key, value))
    fmt.write(want, page, slab, fmt.pack(*by_head, None if prompt is None else prompt.repeat(2, 1, 1)))
    assert torch.equal(want[..., : fmt.slabs_at], got[..., : fmt.slabs_at])
    a, b = (fmt.read(x, page) for x in (want, got))
    for name in ("ko_index", "v_codes", "v_scale", "v_zero"):
        assert torch.equal(a[name], b[name]), name
    for name in ("k_norm", "ko_norm"):
        torch.testing.assert_close(a[name].float(), b[name].float(), rtol=1e-3, atol=0)
    for name in ("k_bits", "ko_bits"):
        wrong = sum(((a[name] ^ b[name]) >> i & 1).sum() for i in range(8))
        assert wrong <= 1e-4 * 8 * a[name].numel(), name


def test_blocks_that_are_nobodys_are_neither_read_nor_written() -> None:
    """Block 0 and ids out of range, as pages and as sidecars (the emulation fails on an address outside a tensor)."""
    fmt = get_format("qjl3").bind(Geometry(64, 32, F32))
    slots = SlotGeometry.of(fmt, 1, 0)
    key, value = (x.transpose(0, 1).contiguous() for x in outlier_data(64, 1, 64, 0))
    pages = torch.zeros(3, 1, fmt.record_bytes, dtype=torch.uint8)
    side = torch.full((2, slots.page_bytes // 4), torch.nan)
    plan = torch.zeros(8, 3, dtype=torch.int32)
    plan[1], plan[2] = 32, 16  # 16 tokens in a ring that no request has
    table = torch.tensor([[0, 0], [9, -1], [2, 2]], dtype=torch.int32)
    side_table = torch.tensor([[0], [7], [-3]], dtype=torch.int32).expand(3, slots.sidecar_blocks).contiguous()
    faults = torch.zeros(2, dtype=torch.int32)
    CUDA.pack(fmt, slots, PackSource(plan, table, side_table, side, key, value, 1), pages, faults)
    assert not pages[:2].any()
    fields = fmt.read(pages, torch.tensor([2]))
    assert (fields["k_norm"][..., :16] == 0).all()
    assert (fields["k_norm"][..., 16:] > 0).all()
    assert not faults.any()


def test_a_long_chunk_is_attended_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, pages = pool(64, 64)
    table, low, high = torch.tensor([[1, 2]]), torch.tensor([0]), torch.tensor([128])
    monkeypatch.setattr(cuda, "WORKSPACE_BYTES", cuda.workspace_bytes(fmt, 1, 4, 2, 2))
    check(fmt, pages, queries(1, 9, 2, 64), table, low, high, splits=1)


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("tuples", "first,longest", "longest,first"),
        ("tuples", "Part:out,lse", "Part:out"),
        ("tuples", "Pair:key,value", ""),
        ("numbers", "FLAGS_AT:16", "FLAGS_AT:20"),
    ],
)
def test_tuples_and_numbers_that_only_one_side_knows(what: str, old: str, new: str) -> None:
    library = cuda.library(torch.device("cpu"))
    said = {"tuples": str(library.tuples()), "numbers": str(library.numbers())}
    assert old in said[what]
    said[what] = said[what].replace(old, new)
    with pytest.raises(ValueError, match=rf"the CUDA library's {what} are .*, and not (Bound:layout|PAGE_MAGIC:8)"):
        cuda.checked(SimpleNamespace(tuples=lambda: said["tuples"], numbers=lambda: said["numbers"]))


def test_a_tuple_of_another_length_is_refused() -> None:
    fmt, pages = pool(64, 64)
    lib, query = cuda.library(torch.device("cpu")), queries(1, 1, 2, 64)
    with pytest.raises(ValueError, match="Bound has 5 members, not 4"):
        lib.attend_table(cuda.bind(fmt, pages.device)[:4], (query,), pages, (), 0.125, 8, pages, (), 0)


def test_refusals_are_one_sentence() -> None:
    query, pages = queries(1, 1, 2, 64), torch.zeros(2, 1, 4096, dtype=torch.uint8)
    one = torch.tensor([[1]]), torch.tensor([0]), torch.tensor([32])
    for name, d, options, says in (
        ("qjl3", 96, {}, "64, 128 and 256"),
        ("qjl3", 64, {"m": 64}, "leave these options out"),
        ("qjl3", 64, {"value_bits": 4}, "value options"),
        ("squat2", 64, {}, "no CUDA kernels"),
    ):
        fmt = get_format(name).bind(Geometry(d, 32), options)
        with pytest.raises(ValueError, match=says):
            CUDA.attend_table(fmt, queries(1, 1, 2, d), pages, *one, 0.1)
    fmt, pages = pool(64, 64)
    odd = torch.zeros(2 * pages.numel(), dtype=torch.uint8)[3 : 3 + pages.numel()].view(pages.shape)
    with pytest.raises(ValueError, match="aligned"):
        CUDA.attend_table(fmt, query, odd, *one, 0.1)
    with pytest.raises(ValueError, match="share"):
        CUDA.attend_table(fmt, queries(1, 1, 3, 64), pages, *one, 0.1)
    with pytest.raises(ValueError, match="positive"):
        CUDA.attend_table(fmt, query, pages, *one, 0.0)

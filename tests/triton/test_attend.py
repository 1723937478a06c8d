"""Decode kernels against float64 attention over the same codes.

What limits the precision is float16: the scaled query, the softmax weights and their products with scales are
rounded to 11 bits, each about 2^-12 off, and independently. The bound is four to ten times what is seen.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from proof.kernels.exact import exact_attention, relative_error
from proof.tables import attended
from vllm_kvq.bench.pools import calibrated, random_pages
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.page import FLAGS_AT, POSITION_AT
from vllm_kvq.kernels.gpu.paged import merge_parts
from vllm_kvq.kernels.gpu.triton.kernels import TRITON as kernels
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.lists import PageList

BOUND = 2e-3
LSE_BOUND = 8e-3
"""Scores here reach +-50, and float16 queries are off by 2^-12 of that."""

wide = functools.partial(pytest.param, marks=pytest.mark.wide)
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")

SUPPORTED = tuple(attended.by_triton())
EVERY_RUN = {("squat2", 64), ("squat4", 256), ("innerq2", 128), ("polar4", 96), ("polar3", 64), ("kitty2", 128)}
EVERY_RUN |= {("klt3", 64)}
"""Each format whose kernels are not another's (KIVI's are SQuat's: test_compile.py), and each head size."""

# every format with every head size, everything else in turn
GRID = [
    (name, d, share, n, dtype)
    for (name, d), share, n, dtype in zip(
        itertools.product(SUPPORTED, (64, 96, 128, 256)),
        itertools.cycle((1, 4, 8)),
        itertools.cycle((32, 64, 128, 64)),
        itertools.cycle((torch.float16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)),
        strict=False,
    )
]


@functools.cache
def pool(name: str, d: int, n: int, pages: int = 4, heads: int = 2) -> tuple[PageFormat, torch.Tensor]:
    fmt = calibrated(get_format(name).bind(Geometry(d, n)), heads)
    return fmt, random_pages(fmt, pages, heads)


def queries(n: int, q: int, heads: int, d: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, q, heads, d, generator=torch.Generator().manual_seed(3)).to(dtype)


def check(
    fmt: PageFormat, pages: torch.Tensor, query: torch.Tensor, table, low, high, splits: int | None, cap: float = 0.0
) -> None:
    scale = fmt.geometry.head_size**-0.5
    out, lse = kernels.attend_table(fmt, query, pages, table, low, high, scale, splits, cap)
    want, want_lse = exact_attention(fmt, query, pages, table, low, high, scale, cap)
    assert out.dtype == lse.dtype == torch.float32
    assert relative_error(out, want) < BOUND
    empty = want_lse == -torch.inf
    assert (lse[empty] == -torch.inf).all()
    assert (out[empty] == 0).all()
    assert (lse.double() - want_lse)[~empty].abs().max() < LSE_BOUND


@pytest.mark.parametrize(
    ("name", "d", "share", "n", "dtype"),
    [pytest.param(*case, marks=[] if case[:2] in EVERY_RUN else pytest.mark.wide) for case in GRID],
)
def test_against_float64(name: str, d: int, share: int, n: int, dtype: torch.dtype) -> None:
    fmt, pages = pool(name, d, n)
    table = torch.tensor([[3, 1, 2], [4, 0, 0]], dtype=torch.int32)
    low, high = torch.tensor([5, 0]), torch.tensor([2 * n + 17, 19])
    check(fmt, pages, queries(2, 1, 2 * share, d, dtype), table, low, high, splits=2)


@pytest.mark.parametrize("options", [{"key_bits": 4, "value_bits": 4}, {"key_bits": 4}, {"value_bits": 4}], ids=str)
def test_innerq_of_other_bits(options: dict[str, object]) -> None:
    fmt = get_format("innerq2").bind(Geometry(64, 32), options)
    table, low, high = torch.tensor([[3, 1, 2], [2, 0, 0]]), torch.tensor([5, 0]), torch.tensor([81, 19])
    check(fmt, random_pages(fmt, 3, 2), queries(2, 1, 8, 64), table, low, high, splits=1)


@pytest.mark.parametrize(("name", "d", "options"), [("kivi2", 256, {"group": 16}), ("polar4", 64, {"mode": "paper"})])
def test_other_options(name: str, d: int, options: dict[str, object]) -> None:
    """Sixteen groups of values leave no row for the sum of the weights; the paper's angles have no parameters."""
    fmt = get_format(name).bind(Geometry(d, 64), options)
    table, low, high = torch.tensor([[3, 1], [2, 0]]), torch.tensor([5, 0]), torch.tensor([81, 19])
    check(fmt, random_pages(fmt, 3, 2), queries(2, 1, 8, d), table, low, high, splits=1)


@pytest.mark.parametrize(
    ("d", "options"),
    [
        (80, {"boost": "eighth", "value_bits": 4}),
        wide(64, {"boost": "half", "value_rotation": "none", "value_scales": "range"}),
        wide(192, {"boost": "half", "group": 48}),
        wide(256, {"boost": "half", "value_bits": 4}),
    ],
)
def test_kitty_of_other_options(d: int, options: dict[str, object]) -> None:
    """16 boosted channels fill less than a product, 48 and 96 have planes of 3 and 6 quads."""
    fmt = get_format("kitty2").bind(Geometry(d, 32), options)
    table, low, high = torch.tensor([[3, 1], [2, 0]]), torch.tensor([5, 0]), torch.tensor([51, 19])
    check(fmt, random_pages(fmt, 3, 2), queries(2, 1, 8, d), table, low, high, splits=1)


@pytest.mark.parametrize(
    ("name", "d", "options"),
    [
        ("klt2", 64, {"key_rate": 1.0}),  # a plane of eight channels
        wide("klt2", 80, {"key_rate": 5.0, "searched_bits": 3}),  # padded; the highest bits in blocks of four channels
        wide("klt4", 192, {"key_rate": 2.2, "searched_bits": 3}),
    ],
)
def test_transformed_keys_of_other_options(d: int, name: str, options: dict[str, object]) -> None:
    fmt = calibrated(get_format(name).bind(Geometry(d, 32), options), 2)
    table, low, high = torch.tensor([[3, 1], [2, 0]]), torch.tensor([5, 0]), torch.tensor([51, 19])
    check(fmt, random_pages(fmt, 3, 2), queries(2, 1, 8, d), table, low, high, splits=1)


def pages_far_apart() -> tuple[PageFormat, torch.Tensor]:
    """Keys with large means, and pages that say that they are at these positions, as damaged ones may, too."""
    fmt, pages = pool("klt3", 64, 64)
    assert fmt.geometry.constants is not None
    fmt = fmt.with_constants(fmt.geometry.constants.each(lambda x: x.index_fill(1, torch.tensor([2]), 0.1)))
    positions = torch.tensor([64, 70_016, -32, 2_000_000_000], dtype=torch.int32)
    pages = pages.clone()
    pages[1:, :, POSITION_AT : POSITION_AT + 4] = positions.view(torch.uint8).view(4, 1, 4)
    return fmt, pages


def test_means_turn_wherever_a_page_is() -> None:
    fmt, pages = pages_far_apart()
    table, low, high = torch.tensor([[3, 1], [2, 4]]), torch.tensor([5, 0]), torch.tensor([128, 128])
    check(fmt, pages, queries(2, 1, 8, 64), table, low, high, splits=1)


@pytest.mark.parametrize("splits", [1, 3])
def test_means_of_more_slabs_than_one_product_has(splits: int) -> None:
    """Forty slabs; a request that begins within one, and one that ends before the table does."""
    fmt, pages = pages_far_apart()
    table = torch.tensor([[1, 2, 3, 4, 1, 3, 2, 4, 3, 1, 4, 2, 2, 1, 3, 4, 4, 1, 2, 3]]).repeat(2, 1)
    table[1] = table[1].roll(1)
    check(fmt, pages, queries(2, 1, 8, 64), table, torch.tensor([70, 0]), torch.tensor([1280, 1100]), splits=splits)


def test_heads_have_constants_of_their_own() -> None:
    """With those of the other head, nothing is right; with another number of them, or none, nothing is read."""
    fmt, pages = pool("klt3", 64, 64)
    constants = fmt.geometry.constants
    assert constants is not None
    swapped = fmt.with_constants(constants.each(lambda x: x.flip(0)))
    query = queries(1, 1, 8, 64)
    one = torch.tensor([[3]]), torch.tensor([0]), torch.tensor([40])
    right, wrong = (kernels.attend_table(f, query, pages, *one, 0.125)[0] for f in (fmt, swapped))
    want, _ = exact_attention(fmt, query, pages, *one, 0.125)
    assert relative_error(right, want) < BOUND < 0.1 < relative_error(wrong, want)
    with pytest.raises(ValueError, match="klt3 has constants of 1 KV heads, but pages have 2"):
        kernels.attend_table(fmt.with_constants(constants.each(lambda x: x[:1])), query, pages, *one, 0.125)
    with pytest.raises(ValueError, match="klt has constants that are fitted to another text, and none are given"):
        kernels.attend_table(fmt.with_constants(None), query, pages, *one, 0.125)


@pytest.mark.parametrize(
    ("name", "cap"),
    [
        ("kivi2", 2.0),
        # other kinds of kernels
        *(wide(name, cap) for name in ("innerq2", "polar4", "kitty2") for cap in (2.0, 50.0)),
        wide("kivi2", 50.0),
        wide("klt3", 2.0),  # its scores are too small for the other one to matter
    ],
)
def test_a_soft_cap(name: str, cap: float) -> None:
    fmt, pages = pool(name, 64, 64)
    ragged = torch.tensor([[1, 2, 3], [2, 0, 0]]), torch.tensor([5, 0]), torch.tensor([150, 19])
    check(fmt, pages, queries(2, 1, 8, 64), *ragged, splits=2, cap=cap)
    # the control
    out, _ = kernels.attend_table(fmt, queries(2, 1, 8, 64), pages, *ragged, 0.125, 2)
    want, _ = exact_attention(fmt, queries(2, 1, 8, 64), pages, *ragged, 0.125, cap)
    assert relative_error(out, want) > BOUND


@pytest.mark.parametrize("splits", [wide(1), 3, wide(16)])
@pytest.mark.parametrize("name", ["squat2"])
def test_ragged_lengths_and_empty_splits(name: str, splits: int) -> None:
    fmt, pages = pool(name, 64, 64)
    table = torch.tensor([[1, 2, 3, 4], [2, -1, 99, 0], [4, 3, 0, 0], [0, 0, 0, 0], [1, 3, 4, 0]], dtype=torch.int64)
    low = torch.tensor([0, 0, 64, 0, 31], dtype=torch.int32)
    high = torch.tensor([256, 1, 65, 0, 160], dtype=torch.int32)
    check(fmt, pages, queries(5, 1, 4, 64), table, low, high, splits)


@pytest.mark.parametrize("name", ["squat2", wide("kitty2")])
def test_pages_out_of_range_and_unpacked_slabs_are_not_seen(name: str) -> None:
    """Page 0 is NaN throughout, ids are out of range, one slab's flag is missing: all are ignored."""
    fmt, pages = pool(name, 64, 64)
    pages = pages.clone()
    slab = fmt.slabs_at + fmt.slab_region.nbytes
    pages[2, :, slab : slab + fmt.slab_region.nbytes] = 0xFF
    pages[2, :, FLAGS_AT + 1] = 0
    query = queries(2, 1, 4, 64)
    table = torch.tensor([[1, 2, 0, -7, 1 << 30], [0, -1, 5, 5, 5]], dtype=torch.int32)
    low, high = torch.zeros(2, dtype=torch.int32), torch.tensor([320, 10_000], dtype=torch.int32)
    out, lse = kernels.attend_table(fmt, query, pages, table, low, high, 0.125, splits=3)
    seen = exact_attention(fmt, query[:1], pages, table[:1], low[:1], torch.tensor([96]), 0.125)
    assert relative_error(out[0], seen[0][0]) < BOUND
    assert torch.isneginf(lse[1]).all()
    assert (out[1] == 0).all()


def test_list_of_pages_as_the_reference_takes_it() -> None:
    fmt, pages = pool("kivi2", 64, 64)
    query = queries(3, 2, 4, 64)
    ids, owner = torch.tensor([1, 4, 2, 3]), torch.tensor([0, 0, 0, 2])
    listed = PageList(ids, owner, torch.tensor([0, 3, 0, 60]), torch.tensor([64, 40, 0, 64]))
    got = kernels.attend_packed(fmt, query, pages, listed, 0.125)
    want = attend.attend_packed(fmt, query, pages, listed, 0.125)
    assert relative_error(got[0], want[0].double()) < BOUND
    assert torch.equal(torch.isneginf(got[1]), torch.isneginf(want[1]))


@pytest.mark.parametrize(
    ("name", "d", "rows"),
    [
        ("squat2", 64, (5, 4)),
        wide("squat2", 64, (6, 8)),
        wide("innerq2", 64, (5, 4)),
        wide("squat4", 128, (3, 7)),
        ("innerq2", 128, (3, 7)),
        wide("polar4", 128, (3, 7)),
    ],
)
def test_a_chunk_over_its_history(name: str, d: int, rows: tuple[int, int]) -> None:
    """More rows than one program takes: the prefix kernel is the same kernel."""
    q, share = rows
    fmt, pages = pool(name, d, 64)
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    check(fmt, pages, queries(1, q, 2 * share, d), table, torch.tensor([0]), torch.tensor([160]), splits=2)


@pytest.mark.parametrize("magnitude", [1e-4, 1e3])
@pytest.mark.parametrize("name", ["kivi2", "innerq2"])
def test_extreme_scales_stay_finite(name: str, magnitude: float) -> None:
    """Queries and keys that float16 products of raw numbers would overflow or flush to zero."""
    fmt = get_format(name).bind(Geometry(64, 32))
    pages = torch.zeros(2, 1, fmt.record_bytes, dtype=torch.uint8)
    key = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0)) * magnitude
    state = torch.ones(1, 1, 64) if fmt.state_rows else None
    fmt.write(pages, torch.tensor([1]), torch.tensor([0]), fmt.pack(key, key, state))
    query = queries(1, 1, 1, 64) * magnitude
    one = torch.tensor([[1]]), torch.tensor([0]), torch.tensor([32])
    out, lse = kernels.attend_table(fmt, query, pages, *one, 0.125)
    want, want_lse = exact_attention(fmt, query, pages, *one, 0.125)
    assert relative_error(out, want) < BOUND
    assert (lse - want_lse).abs().max() <= 2e-3 * max(1.0, float(want_lse.abs().max()))


def test_query_strides_and_refusals() -> None:
    fmt, pages = pool("squat2", 64, 64)
    table, low, high = torch.tensor([[1, 2]]), torch.tensor([0]), torch.tensor([100])
    wide = queries(1, 1, 8, 64)
    check(fmt, pages, wide[:, :, ::2], table, low, high, splits=1)
    odd = torch.zeros(2 * pages.numel(), dtype=torch.uint8)[3 : 3 + pages.numel()].view(pages.shape)
    with pytest.raises(ValueError, match="aligned"):
        kernels.attend_table(fmt, wide, odd, table, low, high, 1.0)
    with pytest.raises(ValueError, match="share"):
        kernels.attend_table(fmt, wide[:, :, :3], pages, table, low, high, 1.0)


def test_merge_of_parts() -> None:
    rng = torch.Generator().manual_seed(0)
    out, lse = torch.randn(5, 3, 96, generator=rng), 20 * torch.randn(5, 3, generator=rng)
    lse[2] = -torch.inf
    lse[:, 1] = -torch.inf
    out[:, 1] = 0
    got, total = merge_parts(out, lse)
    weight = lse.double().softmax(0).nan_to_num(0)
    assert relative_error(got, (out.double() * weight[..., None]).sum(0)) < 1e-6
    torch.testing.assert_close(total, lse.logsumexp(0), rtol=1e-6, atol=1e-5)

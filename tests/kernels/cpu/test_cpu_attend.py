"""The C++ kernels against float64 attention over the same codes, on every instruction set of this machine."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from cpu_fuzzing import IN_CPP

from vllm_kvq.bench.pools import calibrated
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.page import HEADER_BYTES
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.quant import LIMIT
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.attend import Partial
from vllm_kvq.kernels.torch.lists import PageList

LOSSY = [name for name in IN_CPP if name != "lossless"]
TOLERANCE = {"qjl3": 1e-2}

torch.set_num_threads(2)  # as CI has

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


def outlier_data(tokens: int, heads: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with outlier channels (some with a bias, as real ones have) and values with outlier tokens."""
    rng = torch.Generator().manual_seed(seed)
    key, value = torch.randn(heads, tokens, d, generator=rng), torch.randn(heads, tokens, d, generator=rng)
    channels = torch.randperm(d, generator=rng)[: max(2, d // 24)]
    key[..., channels] = key[..., channels] * 6 + 8 * torch.randn(heads, 1, len(channels), generator=rng)
    tall = torch.rand(heads, tokens, 1, generator=rng) < 0.03
    return key, torch.where(tall, value * 30, value)


def packed_pages(fmt: PageFormat, pages: int, heads: int, seed: int = 0) -> torch.Tensor:
    """A pool of complete pages and, at index 0, one that is never listed: 0xFF throughout, that is NaN."""
    d = fmt.geometry.head_size
    key, value = outlier_data(pages * fmt.N, heads, d, seed)
    state = None
    if fmt.state_rows:
        queries = torch.randn(heads, 64, d, generator=torch.Generator().manual_seed(seed + 1))
        state = fmt.keys.fit(fmt.widen(queries)[0], fmt.widen(key)[0], None)
    pool = torch.zeros(pages + 1, heads, fmt.record_bytes, dtype=torch.uint8)
    units = fmt.N // fmt.unit
    k, v = (fmt.widen(x)[0].unflatten(1, (pages * units, fmt.unit)).transpose(0, 1).flatten(0, 1) for x in (key, value))
    repeated = None if state is None else state.repeat(pages * units, 1, 1)
    index = torch.arange(pages * units)
    # of a request that began long before
    position = (4096 * fmt.N + index * fmt.unit).repeat_interleave(heads)
    fmt.write(pool, 1 + index // units, index % units, fmt.pack(k, v, repeated, position=position))
    pool[0] = 0xFF
    return pool


def reference(
    fmt: PageFormat, query: torch.Tensor, pool: torch.Tensor, listed: PageList, scale: float, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in float64 over the codes, as the formats' own `unpack` reads them."""
    ids, owner, low, high = listed
    n, q, query_heads, d = query.shape
    heads = pool.shape[1]
    out, lse = torch.zeros(n, q, query_heads, d).double(), torch.full((n, q, query_heads), -math.inf).double()
    key, value = (x.double().unflatten(0, (len(ids), heads))[..., :d] for x in fmt.unpack(fmt.read(pool, ids)))
    for r in range(n):
        parts = [(key[i, :, low[i] : high[i]], value[i, :, low[i] : high[i]]) for i in range(len(ids)) if owner[i] == r]
        if not parts:
            continue
        k, v = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))  # (H, t, d)
        rows = fmt.widen(query[r])[0][..., :d].double().unflatten(1, (heads, -1))
        scores = torch.einsum("qhgd,htd->qhgt", rows, k) * scale
        scores = cap * (scores / cap).tanh() if cap else scores
        lse[r] = scores.logsumexp(-1).flatten(1)
        out[r] = torch.einsum("qhgt,htd->qhgd", scores.softmax(-1), v).flatten(1, 2)
    return out, lse


def check(fmt: PageFormat, got: Partial, want: Partial) -> None:
    tolerance = TOLERANCE.get(fmt.name, 1e-3)
    (out, lse), (out64, lse64) = got, want
    assert out.isfinite().all()
    assert (torch.isneginf(lse) == torch.isneginf(lse64)).all()
    error = (out - out64).norm() / out64.norm().clamp_min(1e-30)
    assert error <= tolerance, f"relative error of the output {error:.2e}"
    seen = lse64.isfinite()
    assert (lse - lse64)[seen].abs().max() <= 20 * tolerance


@functools.cache
def case(
    name: str, d: int, gqa: int, N: int, lengths: tuple[int, ...], q: int, heads: int, low: int, seed: int,
    page_dtype: torch.dtype, options: tuple[tuple[str, Any], ...], cap: float = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of attend_packed and its answer; kept, because all instruction sets get the same ones."""
    pairing = dict(options).get("pairing", "half")
    fmt = calibrated(get_format(name).bind(Geometry(d, N, page_dtype, pairing=pairing), dict(options)), heads)
    count = [-(-n // N) for n in lengths]
    pool = packed_pages(fmt, sum(count), heads, seed)
    rng = torch.Generator().manual_seed(seed + 2)
    query = torch.randn(len(lengths), q, heads * gqa, d, generator=rng)
    ids = 1 + torch.randperm(sum(count), generator=rng)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(count))
    position = torch.cat([torch.arange(c) for c in count])
    high = (torch.tensor(lengths)[owner] - position * N).clamp_max(N)
    lows = torch.where(position == 0, low, 0).minimum(high)
    arguments = (query, pool, PageList(ids, owner, lows, high), d**-0.5, cap)
    want = reference(fmt, *arguments)
    poison(fmt, pool, ids, lows, high)
    return fmt, arguments, want


def run(
    name: str, d: int, gqa: int, N: int, lengths: list[int], *, q: int = 1, heads: int = 2, low: int = 0,
    seed: int = 0, page_dtype: torch.dtype = torch.bfloat16, cap: float = 0.0, **options: Any,
) -> None:  # fmt: skip
    fmt, arguments, want = case(
        name, d, gqa, N, tuple(lengths), q, heads, low, seed, page_dtype, tuple(options.items()), cap
    )
    check(fmt, cpu.attend_packed(fmt, *arguments), want)


def poison(fmt: PageFormat, pool: torch.Tensor, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """NaN into whatever must not be read: slabs without an attended token, and the padding between fields."""
    size, start = fmt.slab_region.nbytes, fmt.slabs_at
    for page, first, last in zip(ids.tolist(), low.tolist(), high.tolist(), strict=True):
        slabs = pool[page, :, start : start + fmt.slabs * size].unflatten(-1, (fmt.slabs, size))
        slabs[:, -(-last // SLAB) :] = 0xFF
        slabs[:, : first // SLAB] = 0xFF
    for region, at, count in ((fmt.page_region, HEADER_BYTES, 1), (fmt.slab_region, start, fmt.slabs)):
        used = torch.zeros(region.nbytes, dtype=torch.bool)
        for field, offset in zip(region.fields, region.offsets, strict=True):
            used[offset : offset + field.nbytes] = True
        for i in range(count):
            pool[..., at + i * region.nbytes : at + (i + 1) * region.nbytes][..., ~used] = 0xFF
    pool[..., start + fmt.slabs * size :] = 0xFF


@pytest.mark.parametrize("name", IN_CPP)
@pytest.mark.parametrize("d", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("gqa", [1, 4, 7, 8])
def test_formats_heads_and_groups(isa: int, name: str, d: int, gqa: int) -> None:
    run(name, d, gqa, 64, [200, 64, 37, 0], seed=d + gqa)


@pytest.mark.parametrize("name", IN_CPP)
def test_heads_of_512(isa: int, name: str) -> None:
    """QJL's outlier numbers are bytes, so it has none there."""
    options = {"outliers": 0} if name == "qjl3" else {}
    run(name, 512, 4, 64, [200, 37, 0], low=20, **options)
    run(name, 512, 4, 32, [90], q=100, heads=1, **options)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("N", [32, 64, 128, 160])
def test_pages_ranges_and_queries(isa: int, name: str, N: int) -> None:
    run(name, 128, 4, N, [2 * N + 50, 31, 5 * N], q=3, low=20, seed=N)
    run(name, 64, 2, N, [3 * N - 1], q=1, low=45, seed=N + 1)


@pytest.mark.parametrize("name", LOSSY)
def test_a_prefix_chunk(isa: int, name: str) -> None:
    run(name, 128, 4, 64, [500, 90], q=37)


@pytest.mark.parametrize("name", IN_CPP)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_a_chunk_of_many_rows(isa: int, name: str, d: int) -> None:
    """Enough rows that pages are unpacked for all at once (csrc/cpu/attend/float32/many.h)."""
    run(name, d, 4, 64, [300, 90], q=100, heads=1, low=20, seed=d)
    run(name, d, 8, 32, [70], q=150, heads=1)  # 1200 rows: more than one task has


@pytest.mark.parametrize("name", IN_CPP)
def test_the_pytorch_kernels_too(name: str) -> None:
    """They serve where nothing is compiled, and read the same pages with NaN where nothing was packed."""
    for q, N, lengths in ((1, 160, (450, 37, 0)), (37, 64, (500, 90))):
        fmt, arguments, want = case(name, 64, 4, N, lengths, q, 2, 20, q, torch.bfloat16, ())
        check(fmt, attend.attend_packed(fmt, *arguments), want)


@pytest.mark.parametrize("cap", [2.0, 50.0])
@pytest.mark.parametrize("name", IN_CPP)
def test_a_soft_cap(isa: int, name: str, cap: float) -> None:
    """For a decode step, and for a chunk of many rows."""
    run(name, 128, 4, 64, [200, 64, 37, 0], cap=cap)
    run(name, 64, 4, 64, [300, 90], q=100, heads=1, low=20, cap=cap)


@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_a_dropped_cap_is_noticed(cap: float) -> None:
    fmt, arguments, want = case("squat2", 128, 4, 64, (200, 64, 37, 0), 1, 2, 0, 0, torch.bfloat16, (), cap)
    for kernels in (cpu, attend):
        check(fmt, kernels.attend_packed(fmt, *arguments), want)
        with pytest.raises(AssertionError, match="relative error"):
            check(fmt, kernels.attend_packed(fmt, *arguments[:-1]), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_queries(dtype: torch.dtype) -> None:
    fmt, (query, *rest), _ = case("kivi4", 80, 4, 64, (100,), 2, 2, 0, 0, torch.bfloat16, ())
    query = query.to(dtype)
    query[0, 0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])  # replaced as formats/parts/quant.py says
    got, want = (cpu.attend_packed(fmt, x, *rest) for x in (query, fmt.widen(query)[0][..., :80]))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("squat2", {"value_bits": 4, "group": 64}),
        ("squat4", {"value_bits": 2, "group": 48}),
        ("kivi2", {"values": "innerq"}),
        ("kivi2", {"values": "raw"}),
        ("innerq2", {"key_bits": 4, "value_bits": 4}),
        ("innerq2", {"values": "token", "group": 128}),
        ("qjl3", {"m": 512, "m_out": 32, "outliers": 5}),
        ("qjl3", {"outlier_choice": "slab"}),  # other outliers in each slab
        ("qjl3", {"outliers": 0}),
        ("qjl3", {"outliers": 0, "m": 96, "sketch": "gaussian"}),
        ("qjl3", {"m": 1024, "m_out": 1024}),
        ("qjl3", {"m": 1056}),  # more than the integer kernels take
        ("polar4", {"mode": "paper"}),
        ("polar4", {"values": "raw"}),
        ("polar3", {"mode": "paper"}),
        ("polar4", {"angle_bits": 2, "radius_bits": 2}),
        ("polar3", {"angle_bits": 2, "radius_bits": 4}),
        ("polar3", {"angle_bits": 3}),
        ("polar4", {"angle_bits": 3, "mode": "paper"}),
        ("polar4", {"pairing": "interleaved"}),
        ("klt2", {"key_rate": 1.0, "searched_bits": 4}),
        ("klt2", {"key_rate": 5.0, "searched_bits": 3}),
        ("klt2", {"values": "token"}),
        ("kitty2", {"values": "searched", "searched_bits": 3}),
        ("kivi2", {"value_rotation": "hadamard"}),
        ("kitty2", {"boost": "eighth"}),
        ("kitty2", {"boost": "half"}),
        ("kitty2", {"key_scales": "range", "value_rotation": "none"}),
        ("kivi4", {"value_rotation": "hadamard", "value_scales": "fitted", "group": 256}),
    ],
)
def test_option_combinations(isa: int, name: str, options: dict[str, Any]) -> None:
    for d in (96, 128):
        run(name, d, 4, 64, [150, 70], **options)
        run(name, d, 4, 64, [150, 70], q=100, heads=1, **options)


@pytest.mark.usefixtures("isa")
def test_rotated_values_at_the_clamp() -> None:
    """One token's output is what the codec reads; that of several is clamped, as the codec clamps each of them."""
    fmt = get_format("kivi2").bind(Geometry(64, 32), {"value_rotation": "hadamard", "group": 256})
    rng = torch.Generator().manual_seed(0)
    key, value = torch.randn(1, 32, 64, generator=rng), LIMIT * torch.randn(1, 32, 64, generator=rng).sign()
    pool = torch.zeros(1, 1, fmt.record_bytes, dtype=torch.uint8)
    zero = torch.zeros(1, dtype=torch.int64)
    fmt.write(pool, zero, zero, fmt.pack(key, value, None))
    stored = fmt.unpack(fmt.read(pool, zero))[1][0]
    assert (stored.abs() == LIMIT).any()
    for q in (1, 100):
        query = torch.zeros(1, q, 1, 64)
        lists = (PageList(zero, zero, zero, zero + n) for n in (1, 2))
        one, several = (cpu.attend_packed(fmt, query, pool, listed, 1.0)[0] for listed in lists)
        assert (one[0, :, 0] - stored[0]).norm() <= 1e-4 * stored[0].norm() * q**0.5
        assert 0.6 * LIMIT < several.abs().max() <= LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lossless_in_every_type(isa: int, dtype: torch.dtype) -> None:
    run("lossless", 64, 2, 64, [100], page_dtype=dtype)


def test_index_errors_come_before_any_read() -> None:
    fmt = get_format("kivi2").bind(Geometry(64, 32))
    pool = packed_pages(fmt, 2, 1)
    query = torch.randn(1, 1, 1, 64)
    zero, full = torch.zeros(1, dtype=torch.int64), torch.full((1,), 32)
    for ids, owner in ((3, 0), (-1, 0), (1 << 40, 0), (1, 1), (1, -1)):
        with pytest.raises(IndexError):
            cpu.attend_packed(fmt, query, pool, PageList(zero + ids, zero + owner, zero, full), 1.0)


def test_strided_inputs() -> None:
    fmt = get_format("squat2").bind(Geometry(64, 64))
    pool = packed_pages(fmt, 4, 2)
    wide = torch.zeros(5, 3, fmt.record_bytes + 128, dtype=torch.uint8)
    wide[:, :2, : fmt.record_bytes] = pool
    query = torch.randn(2, 3, 8, 2, 64).transpose(1, 3)[:, :, :, 1]  # (2, 2, 8, 64) with unusual strides
    ids, owner = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 0, 1, 0])
    low, high = torch.tensor([0, 3, 5, 0]), torch.tensor([64, 64, 64, 40])
    listed = PageList(ids, owner, low, high)
    got = cpu.attend_packed(fmt, query, wide[:, :2, : fmt.record_bytes], listed, 0.125)
    check(fmt, got, reference(fmt, query, pool, listed, 0.125))


def test_any_number_of_threads_gives_the_same_answer() -> None:
    fmt = get_format("squat2").bind(Geometry(64, 64))
    pool = packed_pages(fmt, 40, 1)
    query = torch.randn(1, 1, 4, 64)
    ids, owner = torch.arange(1, 41), torch.zeros(40, dtype=torch.int64)
    low, high = torch.zeros(40, dtype=torch.int64), torch.full((40,), 64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(cpu.attend_packed(fmt, query, pool, PageList(ids, owner, low, high), 0.125)[0])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-3, atol=1e-4)

"""Packing and fitting in C++ against the PyTorch codecs, field by field, on every instruction set of this machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from one_each import METHODS

from vllm_kvq.bench.pools import calibrated, outlier_data, state_for
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.methods.squat import PLAIN
from vllm_kvq.kernels.cpu import pack as cpu_pack
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.torch import pack as reference
from vllm_kvq.kernels.torch.pack import Pair, Units

H = 2
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
MOVED = {"squat": 2e-4, "qjl": 1e-3, "polar": 2e-4, "klt": 2.5e-3, "searched": 2.5e-3}
"""Share of a field's elements that a sum in another order, or another arctangent, may move across a border; else 0.

A parameter that moves by one float16 takes a group of codes with it, hence more than the 1e-5 of single codes; one
scale of klt's smallest pool is 2e-3 of them all.
"""
FITTED = 1e-2
"""The same for scales and zeros that are sums themselves; a zero next to 0 is a difference of larger numbers."""
FITTED_SCALES = {"klt": "k_scale", "searched": "v_scale"}
"""By codec: those that are fitted to a token's codes."""

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


def tokens(fmt: PageFormat, dtype: torch.dtype, seed: int) -> tuple[Pair, Pair, Units]:
    """Four complete pages and one unit of a page just begun, from a strided pool and from new tokens, shuffled."""
    d = fmt.geometry.head_size
    per_page = fmt.N // fmt.unit
    count = 4 * per_page + 1
    total = count * fmt.unit
    key, value = (x.transpose(0, 1).to(dtype) for x in outlier_data(total, H, d, seed))
    key[3, 0, 5], value[4, 1, 6], key[40, 1, 7], value[7, 0, 1] = math.nan, math.inf, -math.inf, 1e30
    key[:64, :, 9] = 0  # a dead channel, constant groups
    value[8, 0], value[9, 0, :32] = 0.25, -3.0
    key[10:20, :, :16] = 1e-6 * key[10:20, :, :16]  # parameters below float16's normal numbers
    rng = torch.Generator().manual_seed(seed)
    stored = total // 2
    pool = torch.full((stored // 8 + 1, 8 * 2 * H * d + 64), math.nan).to(dtype)
    slots = pool[:, : 8 * 2 * H * d].view(-1, 8, 2, H, d)
    at = torch.randperm(slots.shape[0] * 8, generator=rng)[:stored]
    slots[at // 8, at % 8] = torch.stack([key[:stored], value[:stored]], dim=1)
    order = torch.randperm(total - stored, generator=rng)
    wide = torch.full((total - stored, 3, H, d), math.nan).to(dtype)  # as views of one projection's output
    wide[order, 0], wide[order, 2] = key[stored:], value[stored:]
    rows = torch.cat([at, slots.shape[0] * 8 + order]).view(count, fmt.unit)
    index = torch.arange(count)
    units = Units(
        1 + index // per_page,
        index % per_page,
        rows,
        index // per_page % 2,
        torch.zeros(count, dtype=torch.bool),
        4096 * fmt.N + index * fmt.unit,
    )
    return (slots[:, :, 0], slots[:, :, 1]), (wide[:, 0], wide[:, 2]), units


def both(name: str, d: int, dtype: torch.dtype, n: int, **options: object) -> tuple[PageFormat, list[torch.Tensor]]:
    """The reference's pages and the kernel's; both count the same damage."""
    pairing = options.pop("pairing", "half")
    fmt = calibrated(get_format(name).bind(Geometry(d, n, dtype, pairing=str(pairing)), options), H)
    old, new, units = tokens(fmt, dtype, seed=d + n)
    state = None
    if fmt.state_rows:
        seeds = (outlier_data(96, H, d, i)[0] for i in range(2))
        state = torch.stack([s for i, k in enumerate(seeds) if (s := state_for(fmt, k, i)) is not None])
        state = torch.stack([state, state], dim=1)[:, 0]  # strided, as the sidecar's slots are
    follows = units.follows.clone()
    follows[-1] = fmt.unit < fmt.N
    pages, lost = [], []
    for kernel in (reference, cpu_pack):
        pool = torch.zeros(7, H, fmt.record_bytes, dtype=torch.uint8)
        columns = units.page, units.unit, units.rows, units.owner, follows, units.position
        begun = Units(*(x[:-1] for x in columns))
        count = int(kernel.pack(fmt, pool, begun, old, new, state))
        if fmt.unit < fmt.N:
            # the last unit continues a page that another state began
            after = units.position - fmt.N + fmt.unit
            last = Units(
                *(x[-1:] for x in (units.page - 1, units.unit + 1, units.rows, 1 - units.owner, follows, after))
            )
            count += int(kernel.pack(fmt, pool, last, old, new, state))
        pages.append(pool)
        lost.append(count)
    assert lost[0] == lost[1] > 0
    return fmt, pages


def compare(fmt: PageFormat, want: torch.Tensor, got: torch.Tensor) -> None:
    assert torch.equal(want[..., :64], got[..., :64])  # magic, position and flags
    ids = torch.arange(1, 5)
    a, b = fmt.read(want, ids), fmt.read(got, ids)
    keys, values = (FITTED if fmt.settings.get(f"{half}_scales") == "fitted" else 0.0 for half in ("key", "value"))
    # a rotated value is a sum, and so are the limits of its range
    rotated = FITTED if fmt.settings.get("value_rotation") == "hadamard" else 0.0
    moved_values = MOVED.get(fmt.values.name, 0.0)
    allowed = {"k": max(MOVED.get(fmt.keys.name, 0.0), keys), "v": max(moved_values, values, rotated)}
    fitted = {FITTED_SCALES.get(codec.name) for codec in (fmt.keys, fmt.values)}
    for name, field in a.items():
        if name == "position":
            continue
        x, y = field.contiguous(), b[name].contiguous()
        whole = {torch.float16: torch.int16, torch.float32: torch.int32}.get(x.dtype, x.dtype)
        moved = float((x.view(whole) != y.view(whole)).float().mean())
        most = max(allowed[name[0]], FITTED if name in fitted else 0.0)
        assert moved <= most, f"{name}: {moved:.2e} of the elements differ"
    for x, y in zip(fmt.unpack(a), fmt.unpack(b), strict=True):
        assert y.isfinite().all()
        if fmt.keys.name != "qjl":
            assert (x - y).norm() <= 3e-2 * x.norm()
    # nothing outside the listed units was written
    assert not got[0].any()
    assert not got[5 if fmt.unit < fmt.N else 6 :].any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("name", "d", "dtype", "n", "options"),
    [
        ("kivi2", 128, torch.float32, 64, {}),
        *((name, 512, torch.float32, 64, {}) for name in (*METHODS, "polar3") if name != "qjl3"),
        ("polar4", 512, torch.float32, 64, {"angle_bits": 3}),
        ("qjl3", 512, torch.float32, 64, {"outliers": 0}),
        ("kivi4", 80, torch.float16, 128, {}),
        ("kivi2", 256, torch.bfloat16, 64, {"group": 48}),
        ("squat2", 128, torch.float32, 64, {}),
        ("squat2", 128, torch.float32, 64, {"g": 48, "r": 16}),
        ("squat2", 128, torch.float32, 64, {"g": 32, "r": 16, "floor": 64}),  # well above 1 / lambda
        ("squat4", 64, torch.bfloat16, 128, {"g": 16}),
        ("squat2", 80, torch.float32, 64, {"g": 16, "r": 64}),
        ("squat2", 80, torch.bfloat16, 128, {"key_scales": "range", "boost": "half"}),
        ("squat2", 64, torch.float16, 64, {"key_scales": "range", "boost": "eighth", "g": 16}),
        ("squat2", 256, torch.float32, 64, {"key_scales": "range"}),
        ("squat2", 128, torch.float32, 64, PLAIN),
        ("squat2", 128, torch.float32, 64, PLAIN | {"g": 48, "r": 16}),
        ("squat2", 128, torch.float32, 64, PLAIN | {"g": 32, "r": 16, "floor": 64}),
        ("squat2", 80, torch.float32, 64, PLAIN | {"g": 16, "r": 64}),
        ("kivi2", 128, torch.float32, 64, {"key_scales": "fitted", "group": 48}),
        ("kivi2", 96, torch.float16, 64, {"value_scales": "fitted", "group": 80}),
        ("squat4", 80, torch.bfloat16, 128, {"key_scales": "fitted", "value_scales": "fitted"}),
        ("kivi2", 128, torch.float32, 64, {"value_rotation": "hadamard"}),
        ("kivi4", 80, torch.bfloat16, 128, {"value_rotation": "hadamard", "value_scales": "fitted", "group": 256}),
        ("kitty2", 128, torch.float32, 64, {}),
        ("kitty2", 80, torch.bfloat16, 128, {"key_scales": "range", "boost": "half"}),
        ("kitty2", 64, torch.float16, 64, {"key_scales": "range", "boost": "eighth", "value_rotation": "none"}),
        ("innerq2", 128, torch.float32, 64, {}),
        ("innerq2", 64, torch.bfloat16, 128, {"key_bits": 4, "value_bits": 4}),
        ("innerq2", 112, torch.float16, 128, {}),
        ("innerq2", 80, torch.float32, 64, {"quant_mode": "symmetric"}),
        ("innerq2", 128, torch.float16, 64, {"quant_mode": "asymmetric", "key_norm": "none"}),
        ("polar4", 128, torch.float32, 64, {}),
        ("polar3", 64, torch.bfloat16, 96, {"pairing": "interleaved"}),
        ("polar3", 192, torch.float32, 32, {"mode": "paper"}),
        ("polar3", 96, torch.float32, 64, {"angle_bits": 3}),  # 48 pairs: not all words of the third bits are full
        ("polar4", 128, torch.bfloat16, 64, {"angle_bits": 3, "mode": "paper"}),
        ("polar4", 128, torch.bfloat16, 64, {"mode": "paper", "values": "raw"}),
        ("qjl3", 128, torch.float32, 64, {}),
        ("qjl3", 64, torch.bfloat16, 128, {"m": 96, "m_out": 32, "outliers": 5}),
        ("qjl3", 128, torch.float32, 64, {"outliers": 0}),
        ("qjl3", 80, torch.bfloat16, 64, {"outliers": 0, "m": 96, "sketch": "gaussian"}),
        ("klt2", 128, torch.float32, 64, {}),
        ("klt2", 64, torch.bfloat16, 128, {"key_rate": 5.0, "searched_bits": 3}),
        ("klt3", 80, torch.bfloat16, 128, {}),
        ("klt3", 256, torch.float16, 64, {}),
        ("klt4", 192, torch.float32, 32, {}),
        ("klt4", 512, torch.float32, 64, {}),
        ("lossless", 64, torch.float16, 64, {}),
        ("lossless", 80, torch.float32, 64, {}),
        ("lossless", 128, torch.bfloat16, 128, {}),
    ],
)
def test_bytes_of_the_reference(name: str, d: int, dtype: torch.dtype, n: int, options: dict[str, object]) -> None:
    fmt, (want, got) = both(name, d, dtype, n, **options)
    compare(fmt, want, got)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("d", [80, 128])
@pytest.mark.parametrize("name", ["kitty2", "squat2"])
def test_of_equally_wide_channels_the_first_are_boosted(name: str, d: int) -> None:
    fmt = get_format(name).bind(Geometry(d, 32, torch.float32), {"key_scales": "range"})
    rng = torch.Generator().manual_seed(0)
    key = torch.randint(0, 4, (32, H, d), generator=rng).float()
    key[0], key[1] = 0, 3
    key[:, 1, d // 2 :] += key[:, 1, d // 2 :]  # the wider half comes first, though it is stored second
    zero = torch.zeros(1, dtype=torch.int64)
    units = Units(zero, zero, torch.arange(32)[None], zero, torch.zeros(1, dtype=torch.bool), zero)
    nothing = key[:0].unsqueeze(1), key[:0].unsqueeze(1)
    want, got = (torch.zeros(1, H, fmt.record_bytes, dtype=torch.uint8) for _ in range(2))
    for kernel, pages in ((reference, want), (cpu_pack, got)):
        kernel.pack(fmt, pages, units, nothing, (key, key), None)
    a, b = fmt.read(want, zero), fmt.read(got, zero)
    for name in ("k_scale", "k_zero", "k_codes", "k_high"):
        assert torch.equal(a[name], b[name]), name
    boosted = a["k_scale"].signbit().squeeze()
    assert boosted[0, :16].all()
    assert not boosted[1, : d // 2].any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
def test_squat_subspace_is_that_of_a_float64_svd(dtype: torch.dtype) -> None:
    """U U^T weighted by the singular values, which is what the recursion uses, and the energy outside it; in one chunk
    and in three."""
    fmt = get_format("squat2").bind(Geometry(80, 64, dtype), {"r": 5})
    rng = torch.Generator().manual_seed(0)
    spectrum = 0.8 ** torch.arange(80)
    query = (torch.randn(700, H * 3, 80, generator=rng) * spectrum).to(dtype)
    query[5, 1, 3] = math.nan
    key = torch.zeros(700, H, 80, dtype=dtype)
    state = None
    for part, k in zip(query.split([1, 299, 400]), key.split([1, 299, 400]), strict=True):
        state = cpu_pack.fit(fmt, part, k, state)
    one = cpu_pack.fit(fmt, query, key, None)
    rows = fmt.widen(query)[0].double().unflatten(1, (H, 3)).transpose(0, 1).flatten(1, 2)
    _, s, vh = torch.linalg.svd(rows)
    want = vh[:, :5].transpose(1, 2) @ (s[:, :5, None].square() * vh[:, :5])
    for got, tolerance in ((one, 1e-5), (state, 2e-2)):  # chunks keep r directions of each
        u, noise = got[:, :5].double(), got[:, 5].double()
        product = u.transpose(1, 2) @ u
        assert (product - want).norm() <= tolerance * want.norm()
        energy = product.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) + (80 - 5) * noise
        assert torch.allclose(energy, s.square().sum(1, keepdim=True).expand_as(energy), rtol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("layout", [PLAIN, {}], ids=["plain", "boosted"])
def test_a_corrected_key_of_squat_is_finite_in_float16(layout: dict[str, object]) -> None:
    """Near the clamp a correction points beyond it."""
    fmt = get_format("squat2").bind(Geometry(64, 64, torch.float16), layout | {"r": 16, "g": 16})
    rng = torch.Generator().manual_seed(4)
    key = (32768 * torch.rand(64, 1, 64, generator=rng)).half()
    query = torch.randn(64, 1, 16, generator=rng) @ torch.randn(16, 64, generator=rng)
    query = (100 * query * torch.logspace(1, -1, 64)).half()
    state = cpu_pack.fit(fmt, query, key, None)[None]
    index = torch.arange(2)
    units = Units(
        0 * index, index, torch.arange(64).view(2, 32), 0 * index, torch.zeros(2, dtype=torch.bool), 32 * index
    )
    pages = torch.zeros(1, 1, fmt.record_bytes, dtype=torch.uint8)
    cpu_pack.pack(fmt, pages, units, (key[:0].unsqueeze(1), key[:0].unsqueeze(1)), (key, key), state)
    hat = fmt.unpack(fmt.read(pages, torch.arange(1)))[0]
    assert hat.half().isfinite().all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
def test_innerq_norm(dtype: torch.dtype) -> None:
    fmt = get_format("innerq2").bind(Geometry(80, 64, dtype))
    key = outlier_data(100, H, 80, 0)[0].transpose(0, 1).to(dtype)
    key[3, 1, 2], key[4, 0, 3] = math.nan, math.inf
    before = reference.fit(fmt, key, key.roll(1, -1), None)
    for state in (None, before):
        assert torch.equal(cpu_pack.fit(fmt, key, key, state), reference.fit(fmt, key, key, state))


def test_indices_out_of_range_are_errors() -> None:
    fmt = get_format("kivi2").bind(Geometry(64, 64, torch.float32))
    old, new, units = tokens(fmt, torch.float32, 0)
    pool = torch.zeros(7, H, fmt.record_bytes, dtype=torch.uint8)
    for name, bad in (("page", 7), ("page", -1), ("unit", 2), ("rows", 10**6), ("rows", -1)):
        broken = replace(units, **{name: getattr(units, name).clone().fill_(bad)})
        with pytest.raises(IndexError):
            cpu_pack.pack(fmt, pool, broken, old, new, None)
    assert not pool.any()


def test_threads_do_not_change_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = get_format("innerq2").bind(Geometry(64, 128, torch.bfloat16))
    old, new, units = tokens(fmt, torch.bfloat16, 1)
    state = state_for(fmt, outlier_data(96, H, 64, 3)[0], 3)
    assert state is not None
    pages = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        pool = torch.zeros(7, H, fmt.record_bytes, dtype=torch.uint8)
        cpu_pack.pack(fmt, pool, units, old, new, state.expand(2, *state.shape).contiguous())
        pages.append(pool)
    assert torch.equal(*pages)

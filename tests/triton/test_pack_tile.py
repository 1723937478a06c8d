"""What Triton packs a slab at a time, against the bytes of the codecs: Kitty's keys, transformed ones, and values that
are rotated, fitted or searched.

Sums in another order move a scale by a unit of float16 now and then, and a code with it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from proof.kernels.exact import relative_error
from proof.kernels.packing import pack_like_a_step
from vllm_kvq.bench.pools import calibrated, outlier_data
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels.gpu.triton.kernels import TRITON

wide = functools.partial(pytest.param, marks=pytest.mark.wide)
HEADS, TOKENS = 2, 75


def packed(
    fmt: PageFormat, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pages of (tokens, heads, d) by the codecs and by the kernel, half of the first slab from the ring."""
    got, replaced = pack_like_a_step(TRITON, fmt, key, value, 17, state, "cpu")
    units = len(key) // fmt.unit
    of_units = None if state is None else state.repeat(units, 1, 1)
    slabs = (x[: units * fmt.unit].unflatten(0, (units, fmt.unit)) for x in (key, value))
    want, unit = torch.zeros_like(got), torch.arange(units)
    per_page = fmt.N // fmt.unit
    fmt.write(
        want,
        1 + unit // per_page,
        unit % per_page,
        fmt.pack(
            *(fmt.widen(x.transpose(1, 2).flatten(0, 1))[0] for x in slabs),
            of_units,
            position=(unit * fmt.unit).repeat_interleave(key.shape[1]),
        ),
    )
    return want, got, replaced


def random(d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.transpose(0, 1).contiguous().to(dtype) for x in outlier_data(TOKENS, HEADS, d, 1)]


@pytest.mark.parametrize(
    ("name", "d", "dtype", "options"),
    [
        ("kitty2", 128, torch.float32, {}),
        ("kitty2", 80, torch.bfloat16, {"boost": "half", "value_bits": 4}),
        ("kitty2", 64, torch.float32, {"boost": "eighth", "key_scales": "range", "group": 48}),
        ("kivi4", 96, torch.float16, {"value_rotation": "hadamard"}),
        ("kivi2", 64, torch.float32, {"key_scales": "fitted", "group": 48}),
        ("klt2", 64, torch.float32, {}),
        ("klt3", 64, torch.float32, {}),
        ("klt4", 80, torch.bfloat16, {}),  # heads with other slots
        wide("klt4", 128, torch.float16, {}),
        wide("klt2", 192, torch.float32, {"key_rate": 1.0, "searched_bits": 3}),
        wide("klt4", 256, torch.float32, {"key_rate": 5.0}),
        wide("kivi2", 64, torch.float32, {"value_scales": "fitted"}),
        wide("kivi4", 112, torch.bfloat16, {"key_scales": "fitted", "value_scales": "fitted", "group": 256}),
        wide("kitty2", 192, torch.float32, {"boost": "half", "value_bits": 4, "group": 80}),
        wide("kitty2", 256, torch.float16, {"boost": "half", "value_rotation": "none"}),
        wide("kitty2", 256, torch.float32, {"boost": "eighth", "value_bits": 4}),
    ],
)
def test_bytes_of_the_codecs(name: str, d: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    # two pages, of which the second tells where it is
    block = 32 if name == "klt3" else 64
    fmt = calibrated(get_format(name).bind(Geometry(d, block, dtype), options), HEADS)
    want, got, replaced = packed(fmt, *random(d, dtype))
    assert replaced == 0
    assert torch.equal(want[..., :64], got[..., :64])  # magic, position and flags
    assert (want != got).float().mean() <= 1e-3
    read = (fmt.unpack(fmt.read(pages, torch.tensor([1]))) for pages in (want, got))
    for x, y in zip(*read, strict=True):
        assert relative_error(y, x.double()) < 2e-3


@pytest.mark.parametrize(
    ("d", "dtype", "options"),
    [
        (64, torch.float32, {}),
        (128, torch.bfloat16, {"g": 32, "r": 16, "floor": 0}),  # four blocks
        (80, torch.float32, {"boost": "half", "key_scales": "range", "r": 10}),  # padded; blocks of 48 channels
        wide(256, torch.float32, {"g": 96}),  # the last block is a smaller one
    ],
)
def test_boosted_keys_are_corrected_as_the_codec_does(d: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    fmt = get_format("squat2").bind(Geometry(d, 64, dtype), options)
    key, value = random(d, dtype)
    rng = torch.Generator().manual_seed(2)
    # few directions, so that a correction matters
    query = torch.randn(200, HEADS, 4, generator=rng) @ torch.randn(4, d, generator=rng) * torch.logspace(0, -1, d)
    query = query + 0.1 * torch.randn(200, HEADS, d, generator=rng)
    state = fmt.keys.fit(*(fmt.widen(x.float().transpose(0, 1))[0] for x in (query, key)), None)
    want, got, replaced = packed(fmt, key, value, state)
    assert replaced == 0
    # a code that a last bit of a sum moves is an error that the next block takes back, so a few of its codes move, too
    assert (want != got).float().mean() <= 5e-3
    hats = [fmt.unpack(fmt.read(pages, torch.tensor([1])))[0][..., : fmt.geometry.head_size] for pages in (want, got)]
    uncorrected = packed(fmt, key, value)[0]
    plain = fmt.unpack(fmt.read(uncorrected, torch.tensor([1])))[0][..., : fmt.geometry.head_size]
    assert relative_error(hats[1], hats[0].double()) < 0.1 * relative_error(plain, hats[0].double())


def test_of_equally_wide_channels_the_first_are_boosted() -> None:
    """Zeros of both signs are no wider than others, and padding is never boosted."""
    fmt = get_format("kitty2").bind(Geometry(80, 32, torch.float32), {"key_scales": "range", "boost": "half"})
    key = torch.zeros(32, HEADS, 80)
    key[:16, 0] = -0.0
    key[5, 0, 70:] = 1
    key[:, 1] = torch.randint(0, 4, (32, 80), generator=torch.Generator().manual_seed(0))
    key[0, 1], key[1, 1] = 0, 3
    want, got, _ = packed(fmt, key, torch.zeros_like(key))
    assert torch.equal(want, got)
    signs = fmt.read(got, torch.tensor([1]))["k_scale"].signbit().flatten(0, 1)
    assert (signs.sum(-1) == 48).all()
    assert signs[0, 70:80].all()
    assert signs[1, :48].all()


@pytest.mark.parametrize("name", ["kitty2", "klt3"])
def test_replaced_elements_are_counted(name: str) -> None:
    fmt = calibrated(get_format(name).bind(Geometry(64, 32, torch.float32)), HEADS)
    key, value = random(64, torch.float32)
    key[3, 0, 5], key[40, 1, 7], value[20, 0, 63] = torch.nan, torch.inf, -1e9
    key[70, 0, 0] = torch.nan  # in no complete unit
    want, got, replaced = packed(fmt, key, value)
    assert replaced == 3
    assert (want != got).float().mean() <= 1e-3

"""The kernel that unpacks pages against the codecs' own `unpack`, on random pages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from proof.kernels.exact import relative_error
from vllm_kvq.bench.pools import calibrated, random_pages
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels.gpu.triton.codecs import KEYS, VALUES
from vllm_kvq.kernels.gpu.triton.kernels import TRITON

wide = functools.partial(pytest.param, marks=pytest.mark.wide)
HEADS, N = 2, 64


def unpacked(
    fmt: PageFormat, pages: torch.Tensor, ids: list[int], dtype: torch.dtype, seen: tuple[int, int] = (0, 1 << 20)
) -> tuple[list[torch.Tensor], int]:
    into = torch.full((2, len(ids) * fmt.N, HEADS, fmt.geometry.head_size), torch.nan, dtype=dtype)
    faults = torch.zeros(2, dtype=torch.int32)
    TRITON.unpack(fmt, pages, torch.tensor(ids, dtype=torch.int32), seen, (into[0], into[1]), faults)
    return [*into], int(faults[0])


CASES = [
    ("kivi2", 128, {}),
    ("kivi4", 80, {"value_rotation": "hadamard"}),
    ("kitty2", 64, {}),
    ("kitty2", 96, {"boost": "half", "value_bits": 4}),
    ("squat2", 128, {}),
    ("innerq2", 64, {}),
    ("polar4", 128, {}),
    ("polar3", 64, {}),
    ("klt3", 80, {}),
    wide("klt2", 64, {"key_rate": 1.0}),
    wide("klt4", 256, {}),
    ("polar4", 80, {"mode": "paper", "rope_dim": 32, "pairing": "interleaved"}),
    wide("kivi2", 256, {"group": 64}),
    wide("kitty2", 192, {"group": 80}),
    wide("kitty2", 256, {"boost": "eighth"}),
    wide("innerq2", 96, {"key_bits": 4, "value_bits": 4, "quant_mode": "symmetric"}),
    wide("innerq2", 256, {"quant_mode": "asymmetric"}),
    wide("polar3", 96, {"mode": "paper"}),
    wide("polar4", 256, {"angle_bits": 2}),
]


def bound(name: str, d: int, options: dict[str, Any]) -> PageFormat:
    own = dict(options)
    geometry = Geometry(d, N, torch.float32, own.pop("rope_dim", None), own.pop("pairing", "half"))
    return calibrated(get_format(name).bind(geometry, own), HEADS)


@pytest.mark.parametrize(("name", "d", "options"), CASES)
def test_tokens_of_the_codecs(name: str, d: int, options: dict[str, Any]) -> None:
    fmt = bound(name, d, options)
    pages = random_pages(fmt, 3, HEADS)
    ids = [3, 1]
    found, faults = unpacked(fmt, pages, ids, torch.float32)
    assert not faults
    for got, want in zip(found, fmt.unpack(fmt.read(pages, torch.tensor(ids))), strict=True):
        want = want[..., :d].unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(0, 1)
        assert got.shape == want.shape
        assert relative_error(got, want.double()) < 1e-5


def test_every_codec_is_unpacked() -> None:
    """Whatever the tables of the kernels have."""
    formats = [bound(*(case.values if hasattr(case, "values") else case)) for case in CASES]  # type: ignore[arg-type]
    kinds = {KEYS[type(fmt.keys)].kind for fmt in formats}, {VALUES[type(fmt.values)][0] for fmt in formats}
    assert kinds == ({entry.kind for entry in KEYS.values()}, {kind for kind, _ in VALUES.values()})


def test_rounded_to_the_model_s_type() -> None:
    fmt = bound("kitty2", 64, {})
    pages = random_pages(fmt, 1, HEADS)
    exact, _ = unpacked(fmt, pages, [1], torch.float32)
    for got, want in zip(unpacked(fmt, pages, [1], torch.bfloat16)[0], exact, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=0)  # Triton's interpreter rounds towards zero


@pytest.mark.parametrize(
    ("ids", "seen", "faults"),
    [
        ([1, 2], (0, 96), 0),  # the slab that was never packed lies beyond
        ([1, 2], (0, 97), HEADS),
        ([2, 1], (64, 128), 0),
        ([2, 1], (63, 128), HEADS),
        ([1, 0], (0, 128), 2 * HEADS),
        ([1, 99], (0, 128), 2 * HEADS),
        ([1, -1], (0, 128), 2 * HEADS),
    ],
)
def test_what_is_not_packed_is_counted_and_zero(ids: list[int], seen: tuple[int, int], faults: int) -> None:
    """Nothing is read there, not even by a program that nobody needs: it may be NaN."""
    fmt = bound("kitty2", 64, {})
    pages = random_pages(fmt, 2, HEADS)
    pages[0] = 255
    pages[2, :, 16 + 1] = 0
    region = fmt.slab_region.nbytes
    pages[2, :, fmt.slabs_at + region : fmt.slabs_at + 2 * region] = 255
    found, counted = unpacked(fmt, pages, ids, torch.float32, seen)
    assert counted == faults
    for x in found:
        assert torch.isfinite(x).all()
        for place, page in enumerate(ids):
            second = x[place * N + 32 : place * N + 64]
            assert bool(second.any()) == (page == 1)

"""Other people's methods compared with what their own code makes of the same numbers (vectors/, with the recorders)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.eval.peers.int4_token import signed_hadamard
from vllm_kvq.eval.peers.turbo import levels
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.constants import Calibration, Constants
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.roundtrip import through_pages

VECTORS = Path(__file__).parent / "vectors"
HALF = 2**-10
"""Relative error of a float16, doubled: vLLM's kernels return float16."""


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_turbo(d: int, bits: int) -> None:
    """vLLM's kernels leave keys rotated."""
    vectors = load_file(VECTORS / "turboquant.safetensors")
    known = vectors[f"{d}.{bits}.levels"]
    near(levels(d, bits), known, 1e-6)
    key, value = (vectors[f"{d}.{name}"].float() for name in ("key", "value"))
    k, v = roundtrip(f"turbo{bits}", key, value)
    near(k[:, 0] @ hadamard(d), vectors[f"{d}.{bits}.rotated_key"].float(), HALF)
    near(v[:, 0], vectors[f"{d}.{bits}.value"].float(), HALF)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("half", ["key", "value"])
def test_int4_token(d: int, half: str) -> None:
    """vLLM's scale contains the factor sqrt(d) that vLLM leaves in rotated numbers; ours does not."""
    vectors = load_file(VECTORS / "int4_per_token_head.safetensors")
    both = vectors[f"{d}.{half}_scale"].view(torch.int32)[:, None]
    scale, zero = (both & -16).view(torch.float32), both & 15
    want = (vectors[f"{d}.{half}_codes"].int() - zero) * scale / d**0.5
    x = vectors[f"{d}.{half}"].float()
    got = roundtrip("int4_token", x, x)[half == "value"][:, 0] @ signed_hadamard(d)
    near(got, want, 1e-5)


@pytest.mark.parametrize("tile", ["large", "small"])
@pytest.mark.parametrize("name", [n for n, fmt in FORMATS.items() if fmt.keys.name == "kvarn"])
def test_kvarn(name: str, tile: str) -> None:
    vectors = load_file(VECTORS / "kvarn.safetensors")
    x = vectors[tile].float()
    page = FORMATS[name].bind(Geometry(64, 128, torch.float32))
    got = page.unpack(page.pack(x[None], x[None], None))
    for half, bits, rotated in (
        ("keys", page.settings.get("key_bits"), got[0]),
        ("values", page.settings.get("value_bits"), got[1]),
    ):
        codes, scale, zero, along = (
            vectors[f"{tile}.{half}.{bits}.{what}"].float() for what in ("codes", "scale", "zero", "along")
        )
        want = (codes * scale[:, None] + zero[:, None]) * along
        near(rotated[0] @ hadamard(64), want.T if half == "keys" else want, 1e-5)


def oscar() -> tuple[dict[str, torch.Tensor], Calibration]:
    vectors = load_file(VECTORS / "oscar.safetensors")
    return vectors, Calibration(*(vectors[name].float() for name in "qkv"))


def test_oscar_fits() -> None:
    """Up to the signs of eigenvectors, which are free."""
    vectors, calibration = oscar()
    page = FORMATS["oscar2"].bind(Geometry(64, 64, torch.float32)).calibrated_on(calibration)
    for half, got in (("k", page.geometry.constants.keys), ("v", page.geometry.constants.values)):  # type: ignore[union-attr]
        assert got is not None
        assert got.shape == (2, 64, 64)
        assert torch.equal(got[0], got[1])
        # back from U H P: the position of each eigenvector, with the Hadamard matrix before and the order after it
        same = got[0].T @ vectors[f"{half}.rotation"]
        signs = hadamard(64) @ order(64).T @ same @ order(64) @ hadamard(64)
        near(signs.abs(), torch.eye(64), 1e-3)


def order(d: int) -> torch.Tensor:
    """P for eigenvalues in ascending order."""
    reversed_bits = [int(f"{i:0{d.bit_length() - 1}b}"[::-1], 2) for i in range(d)]
    columns = torch.zeros(d, dtype=torch.long)
    for i, place in enumerate(reversed_bits):
        columns[place] = d - 1 - i
    return torch.eye(d)[:, columns]


def test_oscar_packs() -> None:
    """With the rotations that its own code has computed."""
    vectors, calibration = oscar()
    tokens = len(vectors["k.codes"])
    constants = Constants(*(vectors[f"{half}.rotation"].expand(2, -1, -1) for half in "kv"))
    page = FORMATS["oscar2"].bind(Geometry(64, 64, torch.float32, constants=constants))
    got = through_pages(page, calibration.key[:tokens], calibration.value[:tokens], None)
    for half, hat in zip("kv", got, strict=True):
        scale, zero = (vectors[f"{half}.{name}"][..., None] for name in ("scale", "zero"))
        near(hat @ vectors[f"{half}.rotation"], (vectors[f"{half}.codes"].float() - zero) * scale, 2**-10)

"""Other people's methods against what their own code makes of the same numbers (vectors/, with what recorded them)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.peers.int4_token import signed_hadamard
from vllm_kvq.formats.peers.turbo import levels
from vllm_kvq.formats.rotation import hadamard

VECTORS = Path(__file__).parent / "vectors"
HALF = 2**-10
"""Relative error of a float16, doubled: vLLM's kernels return such."""


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
    """The factor sqrt(d) that vLLM leaves in rotated numbers stands in its scale; ours has it not."""
    vectors = load_file(VECTORS / "int4_per_token_head.safetensors")
    both = vectors[f"{d}.{half}_scale"].view(torch.int32)[:, None]
    scale, zero = (both & -16).view(torch.float32), both & 15
    want = (vectors[f"{d}.{half}_codes"].int() - zero) * scale / d**0.5
    x = vectors[f"{d}.{half}"].float()
    got = roundtrip("int4_token", x, x)[half == "value"][:, 0] @ signed_hadamard(d)
    near(got, want, 1e-5)


@pytest.mark.parametrize("tile", ["large", "small"])
@pytest.mark.parametrize("name", ["kvarn_k4v4", "kvarn_k4v2", "kvarn_k2v2"])
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

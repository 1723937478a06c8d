"""`value_rotation: hadamard`: per-token values, rotated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.parts.rotation import block, hadamard


def error(value: torch.Tensor, **options: object) -> float:
    hat = roundtrip("kivi2", value, value, **options)[1]
    return ((hat - value).norm() / value.norm()).item()


@pytest.mark.parametrize("head", HEAD_SIZES)
def test_it_is_the_rotated_values_format(head: int) -> None:
    """What is stored for v is what is stored for v H / sqrt(b) without the option."""
    rotated, plain = (FORMATS["kivi2"].bind(Geometry(head, 64), {"value_rotation": r}) for r in ("hadamard", "none"))
    value = torch.randn(2, 64, rotated.geometry.d, generator=torch.Generator().manual_seed(0))
    h, root = hadamard(rotated.geometry.d), block(rotated.geometry.d) ** 0.5
    fields, want = rotated.values.pack(value, None), plain.values.pack(value @ h / root, None)
    assert all(torch.equal(fields[name], want[name]) for name in want)
    assert torch.allclose(rotated.values.unpack(fields), plain.values.unpack(want) @ h * root, atol=1e-5)
    assert rotated.slab_region == plain.slab_region


@pytest.mark.parametrize("scales", ["range", "fitted"])
def test_it_repairs_channels_of_unequal_size(scales: str) -> None:
    value = torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(0))
    large = value * torch.where(torch.arange(128) % 16 == 0, 8.0, 1.0)
    assert error(large, value_scales=scales) > 1.6 * error(large, value_scales=scales, value_rotation="hadamard")
    # with equal channels it is neither better nor worse
    assert np.isclose(
        error(value, value_scales=scales), error(value, value_scales=scales, value_rotation="hadamard"), rtol=0.03
    )


def test_with_fitted_scales_large_groups_do() -> None:
    """At 2.25 bits per element it has less error than KIVI's groups have with 3 bits."""
    value = torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(0))
    value = value * torch.exp(0.5 * torch.randn(128, generator=torch.Generator().manual_seed(1)))
    fewer = {"value_scales": "fitted", "value_rotation": "hadamard", "group": 128}
    assert FORMATS["kivi2"].bind(Geometry(128, 64), fewer).half_bits_per_element("values") == 2.25
    assert error(value, **fewer) < 0.8 * error(value)

"""`key_scales`, `value_scales`: fitted scales have less error than the range's, in every group, for the same bytes."""

from __future__ import annotations

import pytest
import torch

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.methods.kivi import ChannelKeys
from vllm_kvq.formats.parts.fields import Packed
from vllm_kvq.formats.parts.quant import affine_codes, affine_parameters, fitted_parameters
from vllm_kvq.formats.table import suite


def squared_error(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (zero + affine_codes(x, scale, zero, bits) * scale - x).double().square().sum(-1)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("shape", ["normal", "uniform", "outlier", "two values", "far from zero", "tiny"])
def test_no_group_loses(bits: int, shape: str) -> None:
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0))
    x = {
        "normal": x,
        "uniform": torch.special.ndtr(x),
        "outlier": torch.where(torch.arange(32) == 3, 30.0, x),
        "two values": (x > 0).float() * 7 - 3,
        "far from zero": 3000 + x,
        "tiny": 1e-7 * x,
    }[shape]
    fitted, whole = (
        squared_error(x, *parameters(x, -1, bits), bits) for parameters in (fitted_parameters, affine_parameters)
    )
    assert (fitted <= whole * (1 + 1e-4)).all()
    if shape == "normal":
        assert fitted.sum() < {2: 0.63, 4: 0.9}[bits] * whole.sum()


def test_it_is_near_the_best_of_a_search() -> None:
    """All scales and zeros on a fine grid, for a few groups."""
    x = torch.randn(20, 1, 1, 32, generator=torch.Generator().manual_seed(1))
    scale = torch.linspace(0.3, 2.0, 80)[:, None, None]
    zero = torch.linspace(-3.5, 0.0, 80)[:, None]
    best = squared_error(x, scale, zero, 2).amin((-2, -1))
    found = squared_error(x[:, 0, 0], *fitted_parameters(x[:, 0, 0], -1, 2), 2)
    assert found.sum() < 1.08 * best.sum()


@pytest.mark.parametrize(("bits", "least"), [(2, 1.1), (4, 1.03)])
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_scores_and_values_gain(bits: int, least: float, rope: bool) -> None:
    query, key, value = attention_data(128, rope=rope)
    for name in ("kivi", "squat"):
        whole, fitted = (
            roundtrip(f"{name}{bits}", key, value, query[:128], key_scales=scales, value_scales=scales)
            for scales in ("range", "fitted")
        )
        assert score_error(query[128:], key, whole[0]) > least * score_error(query[128:], key, fitted[0])
        assert (whole[1] - value).norm() > (least + 0.03) * (fitted[1] - value).norm()


class Others(ChannelKeys):
    """A third party's codec, which inherits the option with the rest."""

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return super().pack(-x, state)


def test_a_third_partys_subclass_stays_what_it_is() -> None:
    options = {"key_bits": 2, "token_scale": "none"}
    whole, fitted = (Others.bind(Geometry(64, 32), {**options, "key_scales": scales}) for scales in ("range", "fitted"))
    assert type(whole) is Others
    assert isinstance(fitted, Others)
    x = torch.randn(1, 32, 64)
    assert (fitted.unpack(fitted.pack(x, None)) + x).norm() < (whole.unpack(whole.pack(x, None)) + x).norm()


def scales_of(name: str) -> list[str]:
    """The options that choose a format's scales."""
    return [option for option in ("key_scales", "value_scales") if FORMATS[name].settings().get(option)]


@pytest.mark.parametrize("name", [*filter(scales_of, suite("public"))])
def test_the_bytes_mean_the_same(name: str) -> None:
    """Any code that reads a format's pages can read these."""
    whole, fitted = (
        FORMATS[name].bind(Geometry(128, 64), dict.fromkeys(scales_of(name), scales)) for scales in ("range", "fitted")
    )
    assert whole.slab_region == fitted.slab_region
    assert whole.page_region == fitted.page_region
    key, value = torch.randn(2, 64, 128), torch.randn(2, 64, 128)
    state = torch.rand(2, fitted.state_rows, 128) if fitted.state_rows else None
    fields = fitted.pack(key, value, state)
    assert all(torch.equal(a, b) for a, b in zip(whole.unpack(fields), fitted.unpack(fields), strict=True))
    assert not torch.equal(whole.pack(key, value, state)["v_codes"], fields["v_codes"])

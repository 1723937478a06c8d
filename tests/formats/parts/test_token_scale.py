"""`token_scale: balanced`: a scale per token in addition to KIVI's and SQuat's scales per channel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.eval.heads.synthetic import attention_data, score_error, scores
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.methods.kitty import BoostedKeys
from vllm_kvq.formats.parts.balance import balanced
from vllm_kvq.formats.table import suite


def boosted(name: str) -> bool:
    """Whether its channels have different numbers of bits, which a scale per token would take away."""
    return isinstance(FORMATS[name].bind(Geometry(64, 32)).keys, BoostedKeys)


NAMES = [name for name in suite("public") if FORMATS[name].settings().get("token_scale") and not boosted(name)]


def uneven(key: torch.Tensor) -> torch.Tensor:
    """Tokens of a third to three times the usual size, in any order."""
    order = torch.randperm(len(key), generator=torch.Generator().manual_seed(0))
    return key * torch.logspace(-0.5, 0.5, len(key))[order][:, None, None]


def error(name: str, query: torch.Tensor, key: torch.Tensor, token_scale: str, scales: str = "range") -> float:
    hat, _ = roundtrip(name, key, key, query[:64], token_scale=token_scale, key_scales=scales)
    return score_error(query[64:], key, hat)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scales", ["range", "fitted"])
def test_it_repairs_tokens_of_unequal_size(name: str, scales: str) -> None:
    query, key, _ = attention_data(128, tokens=128, rope=True)
    assert error(name, query, uneven(key), "none", scales) > 1.2 * error(name, query, uneven(key), "balanced", scales)
    # and costs tokens of equal size nothing
    assert error(name, query, key, "balanced", scales) < 1.03 * error(name, query, key, "none", scales)


@pytest.mark.parametrize("name", NAMES)
def test_attention_to_large_tokens_pays_for_it(name: str) -> None:
    """Each token gets the same relative error, so the absolute error of large tokens, which softmax weighs, grows."""
    query, key, _ = attention_data(128, tokens=128, rope=True)
    key = uneven(key)

    def attention(keys: torch.Tensor) -> torch.Tensor:
        return (scores(query, keys) / 2 / 128**0.5).log_softmax(-1)

    def divergence(choice: str) -> float:
        exact, hat = attention(key), attention(roundtrip(name, key, key, query, token_scale=choice)[0])
        return (exact.exp() * (exact - hat)).sum(-1).mean().item()

    assert divergence("balanced") > 1.05 * divergence("none")


@pytest.mark.parametrize("name", NAMES)
def test_biased_channels_are_left_alone(name: str) -> None:
    """Qwen2's keys: a large mean, which does not follow a token's size."""
    query, key, _ = attention_data(128, tokens=128)
    key = key + torch.where(torch.arange(128) % 16 == 0, 100.0, 0.0)
    plain, scaled = (roundtrip(name, key, key, query, token_scale=choice)[0] for choice in ("none", "balanced"))
    assert (scaled - key).norm() <= 1.001 * (plain - key).norm()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_with_one_huge_channel_are_left_alone(name: str) -> None:
    """Their size is that of one element; divided by it, the other elements would lose precision."""
    g = torch.Generator().manual_seed(0)
    key = torch.randn(64, 2, 64, generator=g) + 50 * (torch.rand(64, 2, 64, generator=g) < 0.01)
    plain, scaled = (roundtrip(name, key, key, key, token_scale=choice)[0] for choice in ("none", "balanced"))
    assert (scaled - key).norm() <= 1.001 * (plain - key).norm()


def test_the_formula() -> None:
    """s_t (zero + code scale), with the range's scale and zero of each channel of x / s_t."""
    rng = np.random.RandomState(0)
    x = (rng.standard_normal((32, 64)) * np.exp(rng.standard_normal((32, 1)))).astype(np.float32)
    page = FORMATS["kivi2"].bind(Geometry(64, 32), {"token_scale": "balanced"})
    fields = page.keys.pack(torch.from_numpy(x)[None], None)
    token = fields["k_token"].reshape(32, 1).double().numpy()
    assert np.log(token).mean() == pytest.approx(0, abs=1e-3)
    assert token.max() > 3 * token.min()
    y = x / token
    scale = ((y.max(0) - y.min(0)) / 3).astype(np.float16).astype(np.float64)
    zero = y.min(0).astype(np.float16).astype(np.float64)
    want = token * (zero + scale * np.clip(np.round((y - zero) / scale), 0, 3))
    got = page.keys.unpack(fields)[0].numpy()
    assert (np.abs(got - want) > 1e-4 * np.abs(want).max()).mean() < 2e-3


def test_rows_and_columns_vary_alike() -> None:
    x = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-1, 1, 32)[:, None] * torch.logspace(1, -1, 64)
    rows, columns = balanced(x, 4)
    for dim in (-1, -2):
        spread = (x / rows / columns).std(dim)
        assert spread.amax() < 1.3 * spread.amin()


def test_the_best_iterate_is_kept() -> None:
    """A few large elements among small ones: from the third round on the iterates only get worse."""
    g = torch.Generator().manual_seed(2378)
    few = torch.randn(8, 6, generator=g).double() * (torch.rand(8, 6, generator=g) < 0.1)
    x = few * torch.exp(3 * torch.randn(8, 6, generator=g)) + 1e-2 * torch.randn(8, 6, generator=g)
    rows, columns = balanced(x.float(), 16)
    spread = torch.cat([(x / rows / columns).std(dim) for dim in (-1, -2)])
    assert spread.amax() < 2.2 * spread.amin()


def test_bits() -> None:
    plain, scaled = (FORMATS["squat4"].bind(Geometry(128, 64), {"token_scale": x}) for x in ("none", "balanced"))
    assert scaled.half_bits_per_element("keys") - plain.half_bits_per_element("keys") == 16 / 128

"""Whatever the input, the output is finite, has the right shape, and stays in its own group and head."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.eval.peers import PEERS
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.constants import Calibration
from vllm_kvq.formats.methods.qjl import MOST_NAMED
from vllm_kvq.formats.parts.quant import LIMIT

LOSSY = [n for n, f in FORMATS.items() if n != "lossless" and not f.keys.calibrated]
OURS = [n for n in FORMATS if n not in PEERS]
"""We make no promise about how accurate other people's methods are."""
OUR_LOSSY = [n for n in OURS if n in LOSSY]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SPECIAL = [0.0, -0.0, 1e4, -1e4, 1e-40, 6e-8, 65504.0, 3e38, -3e38, math.inf, -math.inf, math.nan]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def nasty(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """key, value (T, H, d), query (T', Hq, d): Gaussians with constant groups, dead channels, single
    outliers, ..."""
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]))
    tokens, d = draw(st.integers(1, 130)), draw(st.sampled_from([64, 80, 128]))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 10**6))
    out = []
    for i, (t, h) in enumerate([(tokens, heads), (tokens, heads), (draw(st.integers(1, 40)), heads * group)]):
        x = normal(t, h, d, seed=seed + i) * draw(st.sampled_from([0.0, 1e-30, 1.0, 300.0, 1e20]))
        for _ in range(draw(st.integers(0, 3))):
            value = draw(st.sampled_from(SPECIAL))
            token, head, channel = (draw(st.integers(0, n - 1)) for n in x.shape)
            where = draw(st.sampled_from(["element", "token", "channel", "group of channels", "tokens"]))
            index: Any = {
                "element": (token, head, channel),
                "token": (token, head),
                "channel": (slice(None), head, channel),
                "group of channels": (token, head, slice(channel // 32 * 32, channel // 32 * 32 + 32)),
                "tokens": (slice(token, token + 32), head),
            }[where]
            x[index] = value
        out.append(x.to(dtype))
    return out[0], out[1], out[2], d


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=60)
@given(nasty())
def test_output_is_finite_and_counted(name: str, case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]) -> None:
    key, value, query, d = case
    k, v = roundtrip(name, key, value, query)
    assert k.shape == key.shape
    assert v.shape == value.shape
    assert k.dtype == v.dtype == key.dtype
    assert k.isfinite().all()
    assert v.isfinite().all()
    page = FORMATS[name].bind(Geometry(d, FORMATS[name].settings().N or 64, key.dtype))
    clean, replaced = page.widen(key)
    assert int(replaced) == int((~(key.float().abs() <= LIMIT)).sum())
    assert clean.isfinite().all()
    assert not clean[..., d:].any()
    assert torch.equal(clean[..., :d][key.abs() <= LIMIT], key.float()[key.abs() <= LIMIT])


@pytest.mark.parametrize("name", OUR_LOSSY)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("value", SPECIAL)
def test_pages_full_of_one_value(name: str, dtype: torch.dtype, value: float) -> None:
    """All groups equal: what fits a float16 parameter comes back at its precision."""
    x = torch.full((33, 2, 64), value).to(dtype)
    k, v = roundtrip(name, x, x, x)
    want = torch.nan_to_num(x.float(), nan=0.0, posinf=LIMIT, neginf=-LIMIT).clamp(-LIMIT, LIMIT)
    # rotated, 63 of a token's 64 numbers are zero except for the rounding of one float16; rotated back these add up
    rounding = {"k": 2e-3, "v": 63 * 2**-11 if FORMATS[name].settings().get("value_rotation") == "hadamard" else 2e-3}
    for half, hat in {"k": k, "v": v}.items():
        if (name, half) != ("qjl3", "k"):
            assert (hat.float() - want).abs().max() <= rounding[half] * want.abs().max() + 2e-7
    if name == "qjl3":
        # one direction for every inlier: the estimator is right only on average
        assert (k.float() - want).norm() <= 0.8 * want.norm() + 1e-6


@pytest.mark.parametrize("name", OUR_LOSSY)
def test_zero_vectors_stay_zero(name: str) -> None:
    """Zero tokens among others do not become garbage."""
    key, value = normal(64, 2, 128), normal(64, 2, 128, seed=1)
    key[10], value[10] = 0, 0
    k, v = roundtrip(name, key, value, key)
    assert k[10].norm() < 0.5 * key.norm() / 8
    assert v[10].norm() < 0.5 * value.norm() / 8
    k, v = roundtrip(name, 0 * key, 0 * value, 0 * key)
    assert k.abs().max() < 1e-6
    assert v.abs().max() < 1e-6


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [1e4, -1e4, math.inf, math.nan])
def test_an_outlier_stays_in_its_pack_unit(name: str, value: float) -> None:
    key, val = normal(128, 2, 128), normal(128, 2, 128, seed=1)
    query = normal(10, 4, 128, seed=2)
    # the state comes from the prompt's keys: keep the outlier out of it, as for a token of the answer
    page = FORMATS[name].bind(Geometry(128, FORMATS[name].settings().N or 64, torch.float32))

    def through(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = [page.widen(x.transpose(0, 1))[0].reshape(-1, page.unit, 128) for x in (k, v)]
        state = None
        if page.state_rows:
            state = page.keys.fit(query.reshape(2, -1, 128), key.transpose(0, 1), None)
            state = state.repeat_interleave(128 // page.unit, 0)
        out = page.unpack(page.pack(*wide, state))
        return out[0].reshape(2, 128, 128), out[1].reshape(2, 128, 128)

    before = through(key, val)
    far_key, far_val = key.clone(), val.clone()
    far_key[70, 1, 5] = far_val[70, 1, 5] = value
    after = through(far_key, far_val)
    start = 70 // page.unit * page.unit
    touched = torch.zeros(2, 128, dtype=torch.bool)
    touched[1, start : start + page.unit] = True
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[~touched], y[~touched])
        assert not torch.equal(x[touched], y[touched])
        assert y.isfinite().all()


def values_in_groups_of_32(name: str) -> bool:
    """Groups of channels as they are: rotated, an outlier would be in all of them."""
    settings = FORMATS[name].settings()
    return (settings.get("group"), settings.get("value_rotation")) == (32, "none")


@pytest.mark.parametrize("name", [*filter(values_in_groups_of_32, OURS)])
def test_a_value_outlier_disturbs_its_own_group_only(name: str) -> None:
    """32 channels of one token."""
    key, value = normal(32, 1, 128), normal(32, 1, 128, seed=1)
    far = value.clone()
    far[7, 0, 40] = 1e4
    a, b = roundtrip(name, key, value, key)[1], roundtrip(name, key, far, key)[1]
    differs = (a != b).nonzero()
    assert set(differs[:, 0].tolist()) == {7}
    assert differs[:, 2].min() >= 32
    assert differs[:, 2].max() < 64


def test_a_key_outlier_disturbs_its_own_channel_only() -> None:
    key = normal(64, 1, 128)
    far = key.clone()
    far[7, 0, 40] = 1e4
    a, b = roundtrip("kivi2", key, key)[0], roundtrip("kivi2", far, key)[0]
    assert set((a != b).nonzero()[:, 2].tolist()) == {40}
    assert set((a != b).nonzero()[:, 0].tolist()) <= set(range(32))


@given(st.integers(0, 10**6), st.sampled_from([2, 4]), st.sampled_from([1e-3, 1.0, 500.0]), st.floats(-50, 50))
def test_affine_rounding_error_is_half_a_step(seed: int, bits: int, size: float, shift: float) -> None:
    """Keys over 32 tokens, values over 32 channels, plus the float16 rounding of the two parameters."""
    x = (normal(32, 1, 64, seed=seed) + shift) * size
    k, v = roundtrip(f"kivi{bits}", x, x)
    rounding = 2**-11 * (x.abs().max() + (x.max() - x.min())) + 2**-24
    step = (x.amax(0) - x.amin(0)) / (2**bits - 1)
    assert ((k - x).abs() <= step / 2 * (1 + 1e-3) + 2 * rounding).all()
    groups = x.unflatten(-1, (2, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    assert ((v - x).unflatten(-1, (2, 32)).abs() <= step[..., None] / 2 * (1 + 1e-3) + 2 * rounding).all()


# -- tokens and heads
# ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 32, 33, 63, 64, 65, 100])
def test_any_number_of_tokens(name: str, tokens: int) -> None:
    key, value = normal(tokens, 2, 64), normal(tokens, 2, 64, seed=1)
    other = Calibration(normal(500, 4, 64, seed=3), normal(500, 2, 64, seed=4), normal(500, 2, 64, seed=5))
    k, v = roundtrip(name, key, value, normal(max(tokens, 1), 4, 64, seed=2), calibration=other)
    assert k.shape == key.shape
    assert (v - value).norm() <= 0.5 * value.norm()
    assert (k - key).norm() <= 0.9 * key.norm()


def keys_have_scales(name: str) -> bool:
    """Neither QJL's sketches nor the angles of PolarQuant's paper have any."""
    return FORMATS[name].keys.name != "qjl" and FORMATS[name].settings().get("mode") != "paper"


@pytest.mark.parametrize("name", [*filter(keys_have_scales, OUR_LOSSY)])
def test_one_token_alone_is_nearly_exact(name: str) -> None:
    """Key parameters that run over tokens have nothing to average; InnerQ's keys run over channels."""
    key = normal(1, 2, 64)
    k, v = roundtrip(name, key, key, normal(1, 4, 64, seed=2))
    if name != "innerq2":
        assert (k - key).norm() < 2e-3 * key.norm()
    else:
        assert (k - key).norm() < 0.4 * key.norm()
        assert (v - key).norm() < 2e-3 * key.norm()


@pytest.mark.parametrize("name", ["lossless", *LOSSY])
@pytest.mark.parametrize(("heads", "query_heads"), [(4, 4), (4, 8), (2, 6), (1, 8), (1, 1)], ids=str)
def test_heads_are_independent(name: str, heads: int, query_heads: int) -> None:
    """MHA, GQA and MQA: each KV head by itself, with the queries of its own group, gives the same."""
    key, value = normal(70, heads, 64), normal(70, heads, 64, seed=1)
    scale = torch.logspace(0, 1, query_heads)[:, None]
    query = normal(20, query_heads, 64, seed=2) * scale
    k, v = roundtrip(name, key, value, query)
    group = query_heads // heads
    for h in range(heads):
        alone = roundtrip(name, key[:, h : h + 1], value[:, h : h + 1], query[:, h * group : (h + 1) * group])
        # products in batches round differently: a code may flip at a tie
        assert (k[:, h : h + 1] != alone[0]).float().mean() < 0.02 or torch.allclose(
            k[:, h : h + 1], alone[0], atol=1e-4
        )
        assert (v[:, h : h + 1] != alone[1]).float().mean() < 0.02


def test_squat_uses_the_queries_of_its_own_group() -> None:
    """A control for the test above: another group's queries give other codes."""
    key, value, query = normal(64, 2, 64), normal(64, 2, 64, seed=1), 10 * normal(20, 4, 64, seed=2)
    right = roundtrip("squat2", key, value, query)[0]
    wrong = roundtrip("squat2", key, value, query[:, [2, 3, 0, 1]])[0]
    mixed = roundtrip("squat2", key, value, query[:, [0, 2, 1, 3]])[0]
    assert (right != wrong).float().mean() > 0.1
    assert (right != mixed).float().mean() > 0.1
    swapped = roundtrip("squat2", key, value, query[:, [1, 0, 3, 2]])[0]
    assert (right != swapped).float().mean() < 0.02


@pytest.mark.parametrize(
    ("name", "d"), [(name, d) for name in ["lossless", *LOSSY] for d in HEAD_SIZES if name != "qjl3" or d <= MOST_NAMED]
)
def test_inputs_are_not_modified(name: str, d: int) -> None:
    key, value, query = normal(33, 1, d), normal(33, 1, d, seed=1), normal(33, 2, d, seed=2)
    copies = [x.clone() for x in (key, value, query)]
    first, second = roundtrip(name, key, value, query), roundtrip(name, key, value, query)
    for x, y in zip((key, value, query), copies, strict=True):
        assert torch.equal(x, y)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["kivi2", "kivi4"])
def test_a_group_far_from_zero_leaves_its_neighbours_alone(name: str) -> None:
    """In float16 its zero is off by more than its range: codes must not run over into other channels' bits."""
    x = normal(32, 1, 64)
    plain = roundtrip(name, x, x)
    for channel in (0, 17, 63):
        far = x.clone()
        far[:, :, channel] = 3001.9 + 0.01 * x[:, :, channel]
        key, _ = roundtrip(name, far, x)
        others = torch.arange(64) != channel
        assert torch.equal(key[..., others], plain[0][..., others])
    # values: groups of 32 channels of a token
    far = x.clone()
    far[5, :, 32:] = 3001.9 + 0.01 * x[5, :, 32:]
    _, value = roundtrip(name, x, far)
    assert torch.equal(value[5, :, :32], plain[1][5, :, :32])
    assert ((value - far)[5, :, 32:].abs() < 2).all()


def fitted_to_nothing(name: str) -> bool:
    """What is fitted to a prompt sees its last token more often."""
    keys = FORMATS[name].keys
    return not (keys.fits_queries or keys.calibrated or keys.name == "qjl")


@pytest.mark.parametrize("name", [*filter(fitted_to_nothing, OURS)])
@pytest.mark.parametrize("tokens", [1, 33, 95])
def test_the_last_token_completes_its_group(name: str, tokens: int) -> None:
    key, value = normal(tokens, 2, 64), normal(tokens, 2, 64, seed=1)
    longer = [torch.cat([x, x[-1:].expand(128 - tokens, -1, -1)]) for x in (key, value)]
    for short, long in zip(roundtrip(name, key, value), roundtrip(name, *longer), strict=True):
        assert torch.equal(short, long[:tokens])

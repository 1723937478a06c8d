"""InnerQ: the hybrid choice by brute force, the slot's encodings, the key norms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_kvq.cli.eval.error import symmetric_share
from vllm_kvq.formats import FORMATS, Geometry
from vllm_kvq.formats.methods.innerq import (
    MODES,
    HybridKeys,
    HybridValues,
    hybrid_dequantize,
    hybrid_quantize,
    usable_norm,
)
from vllm_kvq.formats.parts.planes import unpack_sign_words

GROUPS = hnp.arrays(np.float32, (3, 32), elements=st.floats(-1000, 1000, width=32))
TWO_BITS = {"key_bits": 2, "value_bits": 2, "quant_mode": "hybrid", "key_norm": "prompt"}
ANY = hnp.arrays(np.float32, (2, 32), elements=st.floats(-32768, 32768, width=32, allow_subnormal=True))


def float16(x: float) -> float:
    return max(float(np.float16(min(x, 65504.0))), 2.0**-24)


def brute_force(x: np.ndarray, bits: int) -> tuple[float, float]:
    """The real squared errors of both modes of one group, in float64, from the definitions."""
    top, x = 2**bits - 1, x.astype(np.float64)
    low, scale = x.min(), float16((x.max() - x.min()) / top)
    affine = sum(min((low + c * scale - v) ** 2 for c in range(top + 1)) for v in x)
    scale = float16(np.abs(x).max() / top)
    symmetric = sum(min((c * scale - v) ** 2 for c in range(-top, top + 1)) for v in x)
    return affine, symmetric


def check_choice(x: np.ndarray, bits: int) -> None:
    codes, scale, slot = hybrid_quantize(torch.from_numpy(x), bits)
    decoded = hybrid_dequantize(codes.float(), scale, slot, bits).numpy().astype(np.float64)
    for i, group in enumerate(x):
        affine, symmetric = brute_force(group, bits)
        size = float(np.square(group.astype(np.float64)).sum())
        chosen = symmetric if scale[i].signbit() else affine
        # float32 may take either where the two are equal to rounding
        slack = 1e-5 * max(affine, symmetric) + 1e-12 * size + 1e-30
        assert chosen <= min(affine, symmetric) + slack
        got = float(np.square(decoded[i] - group).sum())
        assert math.isclose(got, chosen, rel_tol=1e-3, abs_tol=1e-9 * size + 1e-12)


@given(GROUPS, st.sampled_from([2, 4]))
def test_each_group_takes_the_better_mode(x: np.ndarray, bits: int) -> None:
    check_choice(x, bits)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0, 2.0, 8.0])
def test_each_group_takes_the_better_mode_on_gaussians(bits: int, shift: float) -> None:
    x = np.random.RandomState(0).standard_normal((60, 32)).astype(np.float32) + np.float32(shift)
    check_choice(x, bits)


def test_symmetric_mode_wins_most_groups() -> None:
    """It has one more bit: codes from -3 to 3 instead of 0 to 3."""
    x = torch.from_numpy(np.random.RandomState(1).standard_normal((20000, 32)).astype(np.float32))
    assert hybrid_quantize(x, 2)[1].signbit().float().mean() > 0.999
    for d in (64, 128):
        keys, values = symmetric_share(d)
        assert 0.9 < keys < 1
        assert values > 0.999


def test_one_sided_groups_are_asymmetric() -> None:
    x = torch.rand(500, 32) + 5
    assert not hybrid_quantize(x, 2)[1].signbit().any()


@given(ANY, st.sampled_from([2, 4]))
def test_what_is_stored_is_legal(x: np.ndarray, bits: int) -> None:
    codes, scale, slot = hybrid_quantize(torch.from_numpy(x), bits)
    assert codes.min() >= 0
    assert codes.max() < 2**bits
    assert slot.dtype == torch.int32
    assert (scale.abs() >= 2.0**-24).all()
    assert torch.equal(scale.half().float(), scale)
    assert hybrid_dequantize(codes.float(), scale, slot, bits).isfinite().all()


@pytest.mark.parametrize("zero", [0.0, -0.0, 1e-40, -1e-45, 1e-38, -32768.0, 3.0000002, -0.1])
def test_slot_keeps_every_float32_zero(zero: float) -> None:
    slot = torch.tensor([zero]).view(torch.int32)
    codes = torch.arange(32) % 4
    x = hybrid_dequantize(codes[None].float(), torch.tensor([0.5]), slot, 2)
    want = np.float32(zero) + codes.numpy().astype(np.float32) * np.float32(0.5)
    np.testing.assert_array_equal(x[0].numpy(), want)


@pytest.mark.parametrize("value", [-0.0, 1e-40, -1e-45, 0.0])
def test_groups_of_next_to_nothing(value: float) -> None:
    codes, scale, slot = hybrid_quantize(torch.full((1, 32), value), 2)
    assert hybrid_dequantize(codes.float(), scale, slot, 2).abs().max() <= 1e-7


@pytest.mark.parametrize("bits", [2, 4])
def test_symmetric_slot_holds_every_sign_pattern(bits: int) -> None:
    """Read as a float these words are NaNs, infinities and denormals; the value must not depend on that."""
    top = 2**bits - 1
    rng = np.random.RandomState(2)
    v = rng.randint(-top, top + 1, (200, 32))
    v[0], v[1], v[2] = -2, 2, 0  # even, or the asymmetric grid would hit them as well
    x = torch.from_numpy((v * 0.25).astype(np.float32))
    x[:, 5] = top * 0.25  # so that the scale is 0.25
    x[:, 6] = -top * 0.25
    codes, scale, slot = hybrid_quantize(x, bits)
    assert (scale == -0.25).all()
    assert torch.equal(unpack_sign_words(slot), x >= 0)
    assert torch.equal(codes, (x * 4).int() & top)
    assert torch.equal(hybrid_dequantize(codes.float(), scale, slot, bits), x)
    # one unsigned (b + 1)-bit code, as the kernels read it
    assert torch.equal(codes + unpack_sign_words(slot) * 2**bits - 2**bits, (x * 4).int())


def test_sign_word_that_is_a_nan() -> None:
    x = hybrid_dequantize(torch.full((1, 32), 3.0), torch.tensor([-0.5]), torch.tensor([-1], dtype=torch.int32), 2)
    assert (x == 1.5).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_one_mode_for_all_groups(bits: int) -> None:
    """Each mode as if the other one were never better; and neither is better than the choice."""
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    x[100:] += torch.linspace(0, 6, 100)[:, None]
    errors = {}
    for mode, name in enumerate(MODES):
        codes, scale, slot = hybrid_quantize(x, bits, mode)
        errors[name] = (hybrid_dequantize(codes.float(), scale, slot, bits) - x).square().sum(-1)
        if name != "hybrid":
            assert (scale.signbit() == (name == "symmetric")).all()
    for i, group in enumerate(x.numpy()):
        affine, symmetric = brute_force(group, bits)
        assert math.isclose(errors["asymmetric"][i], affine, rel_tol=1e-3)
        assert math.isclose(errors["symmetric"][i], symmetric, rel_tol=1e-3)
    assert (errors["hybrid"] <= torch.minimum(errors["symmetric"], errors["asymmetric"]) * (1 + 1e-5)).all()
    assert (errors["symmetric"] < errors["asymmetric"]).any()
    assert (errors["asymmetric"] < errors["symmetric"]).any()


def test_a_mode_is_that_of_keys_and_values() -> None:
    for mode in ("symmetric", "asymmetric"):
        fmt = FORMATS["innerq2"].bind(Geometry(64, 64), {"quant_mode": mode})
        x = torch.randn(1, 64, 64)
        fields = fmt.pack(x, x, torch.ones(1, 1, 64))
        for name in ("k_scale", "v_scale"):
            assert (fields[name].signbit() == (mode == "symmetric")).all()


def test_hybrid_prefill_is_symmetric_where_a_decode_step_completes_a_group() -> None:
    prefill, hybrid, symmetric = (
        FORMATS["innerq2"].bind(Geometry(64, 64), {"quant_mode": mode})
        for mode in ("hybrid_prefill", "hybrid", "symmetric")
    )
    x = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0)) + 3
    state, decoded = torch.ones(3, 1, 64), torch.tensor([False, True, False])
    got = prefill.pack(x, x, state, decoded)
    other, same = hybrid.pack(x, x, state, decoded), symmetric.pack(x, x, state)
    for name, field in got.items():
        assert torch.equal(field[1], same[name][1])
        assert torch.equal(field[[0, 2]], other[name][[0, 2]])
    assert not torch.equal(other["k_scale"], same["k_scale"])
    assert torch.equal(prefill.pack(x, x, state)["k_codes"], other["k_codes"])


def test_without_the_norm_there_is_no_state() -> None:
    """And the page says so: its keys were divided by 1."""
    fmt = FORMATS["innerq2"].bind(Geometry(64, 64), {"key_norm": "none"})
    assert fmt.state_rows == 0
    assert fmt.bits_per_element == FORMATS["innerq2"].bind(Geometry(64, 64)).bits_per_element
    x = torch.randn(1, 64, 64) * 30
    fields = fmt.pack(x, x, None)
    assert (fields["k_inner_norm"] == 1).all()
    plain = hybrid_quantize(x.unflatten(-1, (2, 32)), 2)
    want = hybrid_dequantize(plain[0].float(), *plain[1:], 2).flatten(-2)
    assert torch.allclose(fmt.unpack(fields)[0], want)


# -- which elements share a group
# ------------------------------------------------------------------------------------
def changed(codec: HybridKeys | HybridValues, token: int, channel: int) -> torch.Tensor:
    """The elements whose reconstruction changes when one element becomes an outlier."""
    x = torch.randn(1, 64, codec.d, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[0, token, channel] = 100.0
    before, after = (codec.unpack(codec.pack(v, None))[0] for v in (x, y))
    return (before != after).nonzero()


def test_groups_run_along_the_inner_dimension() -> None:
    """Keys: 32 channels of one token. Values: 32 tokens of one channel."""
    keys, values = HybridKeys(Geometry(128, 64), TWO_BITS), HybridValues(Geometry(128, 64), TWO_BITS)
    at = changed(keys, 37, 70)
    assert set(at[:, 0].tolist()) == {37}
    assert at[:, 1].min() >= 64
    assert at[:, 1].max() < 96
    assert len(at) > 10
    at = changed(values, 37, 70)
    assert set(at[:, 1].tolist()) == {70}
    assert at[:, 0].min() >= 32
    assert len(at) > 10


# -- norms
# -----------------------------------------------------------------------------------------------------------
def test_norm_is_the_prompts() -> None:
    codec = HybridKeys(Geometry(64, 64), TWO_BITS)
    g = torch.Generator().manual_seed(0)
    prompt = torch.randn(2, 100, 64, generator=g)
    state = codec.fit(prompt, prompt, None)
    assert torch.equal(state, prompt.abs().amax(1, keepdim=True).sqrt())
    chunks = None
    for part in prompt.split([1, 60, 39], dim=1):
        chunks = codec.fit(part, part, chunks)
    assert chunks is not None
    assert torch.equal(chunks, state)
    # later keys are ten times as large: the page still divides by the prompt's norm
    later = 10 * torch.randn(2, 64, 64, generator=g)
    fields = codec.pack(later, state)
    assert torch.equal(fields["k_inner_norm"], state[:, 0].half().float())
    grouped = (later / state.half().float()).unflatten(1, (2, 32)).unflatten(-1, (2, 32))
    _, scale, _ = hybrid_quantize(grouped, 2)
    assert torch.equal(fields["k_scale"], scale.transpose(-2, -1))


def test_a_page_carries_on_with_its_own_norm() -> None:
    """`page_state` of a page that was begun gives later slabs exactly the norm of the first."""
    fmt = FORMATS["innerq2"].bind(Geometry(64, 64))
    g = torch.Generator().manual_seed(1)
    state = torch.rand(2, 1, 64, generator=g) * 3
    state[0, 0, :3] = torch.tensor([0.0, 1e-9, 1e-3])
    x = torch.randn(2, 32, 64, generator=g)
    pages = torch.zeros(1, 2, fmt.record_bytes, dtype=torch.uint8)
    page = torch.tensor([0])
    fmt.write(pages, page, torch.tensor([0]), fmt.pack(x, x, state))
    kept = fmt.keys.page_state(fmt.read_page_fields(pages[page].flatten(0, 1)))
    assert kept is not None
    assert torch.equal(kept[:, 0], usable_norm(state[:, 0]))
    assert torch.equal(fmt.pack(x, x, kept)["k_inner_norm"], kept[:, 0])
    fmt.write(pages, page, torch.tensor([1]), fmt.pack(x, x, kept))
    key, _ = fmt.unpack(fmt.read(pages, page))
    assert torch.equal(key[:, :32], key[:, 32:])


def test_norm_guards() -> None:
    norm = usable_norm(torch.tensor([0.0, 1e-30, 1e-3, 2.0**-6, 0.5, 181.0]))
    assert norm.tolist() == [1.0, 2.0**-6, 2.0**-6, 2.0**-6, 0.5, 181.0]
    codec = HybridKeys(Geometry(64, 64), TWO_BITS)
    x = torch.randn(1, 64, 64)
    x[..., 7] = 0
    state = codec.fit(x, x, None)
    assert (codec.unpack(codec.pack(x, state))[..., 7].abs() < 0.5).all()
    # channels dead in the prompt come alive: finite, and the rest of the group survives
    later = torch.randn(1, 64, 64)
    hat = codec.unpack(codec.pack(later, state))
    assert (hat - later).norm() < 0.5 * later.norm()


def test_no_state_means_no_norm() -> None:
    codec = HybridKeys(Geometry(64, 64), TWO_BITS)
    assert (codec.pack(torch.randn(3, 32, 64), None)["k_inner_norm"] == 1).all()

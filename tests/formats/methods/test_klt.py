"""Transform coding: the transform, the allocation of digits, and pages against arithmetic on single numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from vllm_kvq.formats import FORMATS, Geometry, PageFormat
from vllm_kvq.formats.codec import round_up
from vllm_kvq.formats.constants import Calibration, Constants, Moments
from vllm_kvq.formats.methods.klt import ERROR, RATE, REGULAR, SHORTEST, SearchedValues, TransformedKeys, allocated
from vllm_kvq.formats.parts.quant import LIMIT
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.parts.scales import LARGEST, around, scale_of
from vllm_kvq.formats.parts.search import FACTORS, HALF_WIDTH, levels, searched, widths
from vllm_kvq.formats.roundtrip import roundtrip

NAMES = tuple(name for name, fmt in FORMATS.items() if fmt.keys is TransformedKeys)
HEADS = 2


def layer(seed: int, d: int = 64, tokens: int = 1024) -> Calibration:
    """Keys of few directions with a large constant part, and queries that look in other, few directions."""
    fixed, drawn = (torch.Generator().manual_seed(n) for n in (0, seed))
    fade = torch.logspace(0, -1.5, d)[:, None]
    mixing = torch.randn(3, HEADS, d, d, generator=fixed) * fade
    bias = 8 * torch.randn(HEADS, d, generator=fixed)
    q, k, v = torch.randn(3, tokens, 2 * HEADS, d, generator=drawn)
    q = torch.einsum("thd,hde->the", q, mixing[0].repeat_interleave(2, 0))
    k = torch.einsum("thd,hde->the", k[:, :HEADS], mixing[1]) + bias
    return Calibration(q, k, torch.einsum("thd,hde->the", v[:, :HEADS], mixing[2]))


def fitted(name: str, d: int = 64, head: int = 0, **options: object) -> PageFormat:
    """For one head."""
    page = FORMATS[name].bind(Geometry(d, 64, torch.float32), options).calibrated_on(layer(1, d))
    assert page.geometry.constants is not None
    assert page.geometry.constants.keys is not None
    return page.with_constants(Constants(page.geometry.constants.keys[head : head + 1], None))


def parts(page: PageFormat) -> tuple[torch.Tensor, ...]:
    """mu, which nothing turns here, s, digits, T / s and (T^-1 s)^T of a single head."""
    assert isinstance(page.keys, TransformedKeys)
    t = page.keys.transform
    digits = t.channel[0].bincount(minlength=t.mean.shape[-1])
    mean = page.keys.mean_at(torch.zeros(1), 32)[0, 0]
    return mean, t.weight[0, 0].sqrt(), digits, t.forward[0].mT, t.backward[0]


def score_error(text: Calibration, key: torch.Tensor) -> float:
    """The error that softmax sees: a constant that all keys share does not matter."""
    exact, read = (torch.einsum("qhgd,khd->hgqk", text.query.unflatten(1, (HEADS, 2)), k) for k in (text.key, key))
    exact, read = (s - s.mean(-1, keepdim=True) for s in (exact, read))
    return ((read - exact).norm() / exact.norm()).item()


# -- the allocation --------------------------------------------------------------------------------------------------
def test_no_other_allocation_has_less_error() -> None:
    generator = torch.Generator().manual_seed(3)
    for slots in range(9):
        variance = torch.rand(4, generator=generator).pow(4).tolist()
        error = {
            digits: sum(v * ERROR[n] for v, n in zip(variance, digits, strict=True))
            for digits in itertools.product(range(len(ERROR)), repeat=4)
            if sum(digits) == slots
        }
        found = tuple(allocated(variance, slots))
        assert sum(found) == slots
        assert error[found] == pytest.approx(min(error.values()))


def test_the_errors_are_those_of_the_levels() -> None:
    y = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    for digits, error in enumerate(ERROR):
        step, most = widths(torch.tensor(2 * digits))
        codes = (y / step.clamp_min(1e-9) + most / 2).round().clamp_min(0).minimum(most)
        read = levels(codes, step, most) if digits else torch.zeros_like(y)
        assert (read - y).square().mean().item() == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize("bits", range(1, len(HALF_WIDTH)))
def test_no_other_width_has_less_error(bits: int) -> None:
    y = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))

    def error(width: float) -> float:
        most = 2**bits - 1
        codes = (y / (2 * width / most) + most / 2).round().clamp(0, most)
        return ((codes - most / 2) * (2 * width / most) - y).square().mean().item()

    assert error(HALF_WIDTH[bits]) < 1.01 * min(error(HALF_WIDTH[bits] * f) for f in (0.9, 0.95, 1.05, 1.1))


# -- the transform ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("d", [64, 80, 128])
def test_calibration_keys_become_equal_and_uncorrelated(d: int) -> None:
    page, text = fitted("klt3", d), layer(1, d)
    assert isinstance(page.keys, TransformedKeys)
    mean, s, digits, forward, backward = parts(page)
    wide = round_up(d, 32)
    assert torch.allclose(backward.mT @ forward, torch.eye(wide), atol=2e-3)
    y = (torch.nn.functional.pad(text.key[:, 0], (0, wide - d)) - mean) @ forward.mT
    found = y.mT @ y / len(y)
    large = s > 0.01 * s.max()
    assert torch.allclose(found[large][:, large], torch.eye(int(large.sum())), atol=2e-2)
    assert digits.sum() == page.keys.slots == round_up(wide * 3 // 2, 16)
    assert (digits[s.argsort()].diff() >= 0).all()


def test_equal_errors_do_equal_harm() -> None:
    """A coordinate's error of 1 is worth s to the calibration's queries, whose moment is regularized."""
    page, text = fitted("klt3"), layer(1)
    assert isinstance(page.keys, TransformedKeys)
    _, s, _, _, backward = parts(page)
    queries = text.query[:, :2].flatten(0, 1)
    seen = queries.mT @ queries
    seen = 64 * seen / seen.trace() + REGULAR * torch.eye(64)
    assert torch.allclose(((backward @ seen) * backward).sum(-1).sqrt(), s, rtol=1e-3)


def test_no_direction_is_stretched_without_end() -> None:
    """Where a calibration's keys have few directions, or are all the same, another text's may have more."""
    text = layer(1)
    few = text.key.clone()
    few[..., 8:] = 0
    for key in (few, torch.ones_like(few)):
        constants = TransformedKeys.fit_constants(Calibration(text.query, key, text.value), {})
        assert constants.isfinite().all()
        s = constants[:, 1]
        assert (s.amin(-1) >= 0.999 * SHORTEST * s.amax(-1)).all()
        assert (s > 0).all()


def test_sums_of_pieces_are_those_of_the_whole() -> None:
    """Pieces of a text, or ranks with copies of the same heads and other queries."""
    text = layer(1)
    whole = Moments.of(text.query, text.key)
    pieces = Moments.of(text.query[:100], text.key[:100]) + Moments.of(text.query[100:], text.key[100:])
    ranks = Moments.of(text.query[:, ::2], text.key) + Moments.of(text.query[:, 1::2], text.key)
    for found in (pieces, ranks):
        assert torch.allclose(found.covariance, whole.covariance, rtol=1e-9, atol=1e-9)
        assert torch.allclose(found.seen, whole.seen, rtol=1e-9)
    exact = torch.cov(text.key[:, 0].double().mT, correction=0)
    assert torch.allclose(whole.covariance[0], exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_all_heads_at_once_are_each_by_itself(name: str) -> None:
    page, text = FORMATS[name].bind(Geometry(64, 64, torch.float32), {}).calibrated_on(layer(1)), layer(2)
    k, v = (x[:128].unflatten(0, (-1, 32)).transpose(1, 2).flatten(0, 1) for x in (text.key, text.value))
    position = torch.tensor([0, 32, 64, 96])
    fields = page.pack(k, v, None, position=position.repeat_interleave(HEADS))
    query = text.query[:5].unflatten(1, (HEADS, 2)).transpose(0, 1).flatten(1, 2)
    for head in range(HEADS):
        alone = fitted(name, head=head)
        own = alone.pack(k[head::HEADS], v[head::HEADS], None, position=position)
        assert all(torch.equal(own[field], fields[field][head::HEADS]) for field in own)
        assert torch.allclose(alone.unpack(own)[0], page.unpack(fields)[0][head::HEADS], atol=1e-5)
        seen = alone.query_features(query[head : head + 1])[0]
        assert torch.allclose(seen, page.query_features(query)[head], rtol=1e-4, atol=1e-3)


def turned_layer(seed: int, angle: float = 1.0) -> tuple[Calibration, torch.Tensor]:
    """`layer`, whose keys RoPE has turned with a constant part that is larger than all else, and that part (H, d)."""
    text, rope = layer(seed), Rope.plain(64, 1024, 100 / angle)
    constant = 20 * torch.randn(HEADS, 64, generator=torch.Generator().manual_seed(9))
    position = torch.arange(len(text.key))[:, None]
    key = rope.apply(text.key - text.key.mean(0) + constant, position)
    return Calibration(rope.apply(text.query, position), key, text.value, rope), constant


def test_a_constant_that_rope_turns_costs_nearly_nothing() -> None:
    """What a single mean can't take off: then a constant's directions have most of the variance, and of the bits."""
    text, constant = turned_layer(1)
    single = replace(text, turned=None)
    page, other = (FORMATS["klt3"].bind(Geometry(64, 64, torch.float32), {}).calibrated_on(x) for x in (text, single))
    positions = torch.arange(0, 320, 32)
    key = text.key[:320].unflatten(0, (-1, 32)).transpose(1, 2).flatten(0, 1)

    def error(page: PageFormat) -> float:
        fields = page.pack(key, key, None, position=positions.repeat_interleave(HEADS))
        return float((page.unpack(fields)[0] - key).norm())

    assert error(page) < 0.7 * error(other)
    assert isinstance(page.keys, TransformedKeys)
    # slow pairs keep their part; that of a pair that turns far within a slab is smaller
    mean = page.geometry.constants.keys[:, 0]  # type: ignore[union-attr, index]
    slow = torch.arange(64) % 32 > 24
    assert torch.allclose(mean[:, slow], constant[:, slow], atol=0.05 * float(constant.abs().max()))
    assert mean[:, 0].abs().max() < 0.2 * constant[:, 0].abs().max()


def test_means_turn_only_where_keys_do() -> None:
    """NoPE layers, or RoPE of another kind than the table's: then there is a single mean, as if nothing were known."""
    text = layer(1)
    known = replace(text, turned=Rope.plain(64, 1024))
    one, other = (TransformedKeys.fit_constants(x, {}) for x in (text, known))
    assert torch.equal(one, other)
    assert not one[:, 2].any()


# -- pages -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_pages_hold_the_formula(name: str) -> None:
    """Number by number, from the fields of one token."""
    page, text = fitted(name), layer(2)
    assert isinstance(page.keys, TransformedKeys)
    mean, _, digits, forward, backward = (x.double() for x in parts(page))
    x = text.key[:32, 0]
    fields = page.keys.pack((x - mean.float())[None], None) | {"position": torch.tensor([0])}
    scale = scale_of(fields["k_scale"])
    read = page.keys.unpack(fields)[0]
    t = 17
    y = forward @ (x[t].double() - mean)
    # slot by slot as kernels read them: words of four slots from each of four planes, the highest digits first
    quarter = page.keys.slots // 4
    read_first = [
        plane * quarter + 4 * word + i for word in range(quarter // 4) for plane in range(4) for i in range(4)
    ]
    stored = [(j, c) for j in (2, 1, 0) for c in range(64) if j < digits[c]]
    assert len(stored) == page.keys.slots
    want, codes = mean.clone(), [0] * 64
    for slot, (j, c) in zip(read_first, stored, strict=True):
        plane, place = divmod(slot, quarter)
        byte = int(fields["k_codes"][0, 0, place // 4, t, place % 4])
        codes[c] += ((byte >> (2 * plane)) & 3) * 4**j
    for c, code in enumerate(codes):
        bits = 2 * int(digits[c])
        step = 2 * HALF_WIDTH[bits] / max(1, 2**bits - 1)
        level = (code - (2**bits - 1) / 2) * step
        if bits:
            nearest = min(range(2**bits), key=lambda n: abs((n - (2**bits - 1) / 2) * step - y[c] / scale[0, 0, t]))
            assert code == nearest
        want += backward[c] * level * scale[0, 0, t].double()
    assert torch.allclose(read[t].double(), want, rtol=1e-4, atol=1e-4)
    query = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    seen = page.keys.query_features(query[None])[0] @ page.keys.key_features(fields)[0].mT
    assert torch.allclose(seen, query @ read.mT, rtol=1e-4, atol=1e-3 * float(seen.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_scales_harm_scores_least(name: str) -> None:
    """An error in a coordinate counts as its s."""
    page, text = fitted(name), layer(2)
    assert isinstance(page.keys, TransformedKeys)
    mean, s, digits, forward, _ = parts(page)
    x = text.key[:32, 0]
    fields = page.keys.pack((x - mean)[None], None) | {"position": torch.tensor([0])}
    y, read = (x - mean) @ forward.mT, (page.keys.unpack(fields)[0] - mean) @ forward.mT
    step, most = widths(2 * digits)
    tried = []
    for byte in range(1, LARGEST + 1):
        scale = scale_of(torch.tensor(byte, dtype=torch.uint8))
        codes = (y / (scale * step.clamp_min(1e-9)) + most / 2).round().clamp_min(0).minimum(most)
        tried.append(((levels(codes, step, most) * scale - y) * s).square().sum(-1))
    found = ((read - y) * s).square().sum(-1)
    ordered = torch.stack(tried).sort(0).values
    assert (found < 1.01 * ordered[3]).float().mean() > 0.8
    assert found.sum() < 1.15 * ordered[0].sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_are_those_of_the_nearest_levels(bits: int) -> None:
    codec = SearchedValues(Geometry(64, 64), {"searched_bits": bits})
    x = layer(2).value[:64, :1].transpose(0, 1)
    fields = codec.pack(x, None)
    assert [(f.name, f.nbytes) for f in codec.slab_fields if f.name != "v_scale"] == {
        2: [("v_codes", 512)],
        3: [("v_codes", 512), ("v_high", 256)],
        4: [("v_codes", 1024)],
    }[bits]
    y, read = (v[0] @ hadamard(64) / 8 for v in (x, codec.unpack(fields)))
    step, most = widths(torch.tensor(bits))
    scale = scale_of(fields["v_scale"]).flatten()[:, None]
    every = levels(torch.arange(2**bits).float(), step, most) * scale
    nearest = (y[..., None] - every[:, None]).abs().amin(-1)
    assert torch.allclose((read - y).abs(), nearest, rtol=1e-3, atol=1e-5)


def test_the_scale_is_the_best_around_the_one_that_fits() -> None:
    """It fits the codes of the best factor of the root mean square of what is stored."""
    y = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    y[:, 3] *= 9
    weight = torch.rand(32, generator=torch.Generator().manual_seed(1))
    step, most = widths(torch.tensor([2] * 16 + [4] * 12 + [0] * 4))
    y[:, 28:] *= 3
    codes, byte = searched(y, step, most, weight)

    def codes_at(a: torch.Tensor) -> torch.Tensor:
        return (y / (a * step.clamp_min(1e-9)) + most / 2).round().clamp_min(0).minimum(most)

    def error(a: torch.Tensor) -> torch.Tensor:
        return ((levels(codes_at(a), step, most) * a - y).square() * weight).sum(-1)

    rms = y[:, :28].square().mean(-1, keepdim=True).sqrt()
    factors = torch.stack([error(rms * factor) for factor in FACTORS]).argmin(0)
    level = levels(codes_at((rms[:, 0] * torch.tensor(FACTORS)[factors])[:, None]), step, most)
    fitted = (y * level * weight).sum(-1) / (level.square() * weight).sum(-1)
    near = torch.stack(around(fitted))
    errors = torch.stack([error(scale_of(some)[:, None]) for some in near])
    assert torch.equal(byte[:, 0], near.gather(0, errors.argmin(0, keepdim=True))[0])
    assert torch.equal(codes, codes_at(scale_of(byte)))
    assert len(set(factors.tolist())) > 3
    assert len(set(errors.argmin(0).tolist())) > 2
    assert (codes[:, 28:] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_that_is_larger_than_all_that_is_stored(name: str) -> None:
    """Errors of a token's coordinates may add up: without a limit they do here, to what float16 can't hold."""
    page = fitted(name)
    x = LIMIT * torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0)).sign()
    read = page.keys.unpack(page.keys.pack(x, None) | {"position": torch.zeros(1)})
    assert read.abs().max() == LIMIT


# -- what it is for --------------------------------------------------------------------------------------------------
def test_less_error_in_fewer_bits() -> None:
    text, fit = layer(2), layer(1)
    for name, other, part in (("klt2", "kivi2", 0.6), ("klt3", "kitty2", 0.7), ("klt4", "kivi4", 0.9)):
        assert FORMATS[name].bits_per_element(128) < FORMATS[other].bits_per_element(128) + 0.3
        mine, theirs = (
            roundtrip(n, text.key, text.value, text.query, calibration=fit if n == name else None)[0]
            for n in (name, other)
        )
        assert score_error(text, mine) < part * score_error(text, theirs)


def test_a_constant_costs_nothing() -> None:
    """What a key projection's bias adds is in the calibration's mean. Rounding gives few tokens the next scale."""
    fit, text = layer(1), layer(2)
    shift = 50 * torch.randn(HEADS, 64, generator=torch.Generator().manual_seed(5))
    moved = Calibration(fit.query, fit.key + shift, fit.value)
    plain, _ = roundtrip("klt3", text.key, text.value, calibration=fit)
    other, _ = roundtrip("klt3", text.key + shift, text.value, calibration=moved)
    moved_by_more = (other - shift - plain).abs().amax(-1) > 2e-3 * plain.abs().max()
    assert moved_by_more.float().mean() < 3e-3
    assert torch.allclose((other - shift - text.key).norm(), (plain - text.key).norm(), rtol=1e-3)


def test_a_rate_is_rounded_up_to_sixteen_slots() -> None:
    for rate, d, slots in ((2.0, 64, 64), (2.25, 64, 80), (2.25, 128, 144), (3, 96, 144)):
        keys = FORMATS["klt3"].bind(Geometry(d, 64), {RATE.name: rate}).keys
        assert isinstance(keys, TransformedKeys)
        assert keys.slots == slots


def test_constants_of_other_heads_are_refused() -> None:
    keys = fitted("klt3", 128).geometry.constants
    with pytest.raises(ValueError, match=r"constants of shape \(1, 260, 128\) are not those of heads of 64 channels"):
        FORMATS["klt3"].bind(Geometry(64, 64), {}).with_constants(keys)


def test_constants_are_needed() -> None:
    page = FORMATS["klt3"].bind(Geometry(64, 64), {})
    with pytest.raises(ValueError, match="klt has constants that are fitted to another text, and none are given"):
        page.keys.pack(torch.zeros(1, 32, 64), None)

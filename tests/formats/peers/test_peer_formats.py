"""Other people's methods: each against a few lines of NumPy that follow its authors, and its bits counted by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.eval.peers import PEERS
from vllm_kvq.eval.peers.turbo import levels
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.constants import Calibration
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.roundtrip import through_pages
from vllm_kvq.formats.table import VLLM_DTYPES, key_codecs, public_formats, value_codecs

N, D = 64, 128


@pytest.fixture(scope="module")
def tile() -> np.ndarray:
    """(N, D): channels and tokens of unequal size, an outlier channel, a negative mean."""
    rng = np.random.RandomState(3)
    x = rng.standard_normal((N, D)) * np.exp(rng.standard_normal(D)) * np.exp(0.5 * rng.standard_normal((N, 1))) - 0.3
    x[:, 5] += 20
    return x.astype(np.float32)


def through(name: str, x: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """x as keys and as values, through a page that is as long."""
    y = torch.from_numpy(x)[:, None]
    k, v = roundtrip(name, y, y, N=len(x), **options)
    return k[:, 0].numpy(), v[:, 0].numpy()


def f16(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float16).astype(np.float64)


def sylvester(d: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(d)


def agree(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-4) -> None:
    """Equal but for codes at the border of two cells, which float32 and float64 round differently."""
    differs = np.abs(got - want) > tolerance * np.abs(want).max()
    assert differs.mean() < 2e-3


# -- each by its authors' formula ------------------------------------------------------------------------------------
def test_int4_token(tile: np.ndarray) -> None:
    """vLLM's kernel, its rotation with the factor that it leaves in."""
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = (2 * torch.bernoulli(torch.full((D,), 0.5), generator=generator) - 1).numpy()
    y = (tile * signs) @ (sylvester(D) * math.sqrt(D))
    scale = np.maximum((y.max(1) - y.min(1)) / 15, 1e-6)[:, None]
    zero = np.clip(np.trunc(-y.min(1, keepdims=True) / scale + 0.5), 0, 15)
    code = np.clip(np.trunc(np.maximum(y / scale + zero, 0) + 0.5), 0, 15)
    want = ((code - zero) * scale) @ (sylvester(D) * math.sqrt(D)) / D * signs
    for got in through("int4_token", tile):
        assert np.abs(got - want).max() < 2e-2 * np.abs(want).max()
        # each token has one rotation, so a code at a border touches its whole row
        assert (np.abs(got - want).max(1) > 1e-4 * np.abs(want).max()).mean() < 0.1


def test_q4_0(tile: np.ndarray) -> None:
    """ggml's quantize_row_q4_0_ref."""
    y = (tile.astype(np.float64) @ sylvester(D)).reshape(N, -1, 32)
    largest = np.take_along_axis(y, np.abs(y).argmax(-1)[..., None], -1)
    scale = largest / -8
    code = np.minimum(15, np.trunc(y / scale + 8.5))
    want = ((code - 8) * f16(scale)).reshape(N, D)
    for got in through("int4_hadamard_q4_0", tile):
        agree(got @ sylvester(D), want)


@pytest.mark.parametrize("bits", [3, 4])
def test_turbo(bits: int, tile: np.ndarray) -> None:
    """A key's direction is the nearest of the levels' by coordinate, and its norm comes back; values are uniform."""
    norm = np.linalg.norm(tile.astype(np.float64), axis=1, keepdims=True)
    known = levels(D, bits).double().numpy()
    code = np.abs((tile @ sylvester(D) / norm)[..., None] - known).argmin(-1)
    length = np.linalg.norm(known[code], axis=1, keepdims=True)
    keys, values = through(f"turbo{bits}", tile)
    agree(keys @ sylvester(D), f16(norm) * known[code] / length)
    assert np.allclose(np.linalg.norm(keys, axis=1), norm[:, 0], rtol=1e-3)
    low, high = tile.min(1, keepdims=True), tile.max(1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    agree(values, f16(low) + f16(scale) * np.floor((tile - low) / scale + 0.5))


# Max 1960, for a Gaussian of variance 1, as one coordinate of many is distributed
GAUSSIAN = {
    3: [0.2451, 0.7560, 1.3440, 2.1520],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326],
}


@pytest.mark.parametrize("bits", [3, 4])
def test_levels(bits: int) -> None:
    assert levels(4096, bits)[2 ** (bits - 1) :].numpy() * 64 == pytest.approx(GAUSSIAN[bits], rel=2e-3)
    assert levels(64, bits).numpy() * 8 == pytest.approx(levels(4096, bits).numpy() * 64, rel=1e-4)


def kvarn_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns and rows divided in turn; the scales of the iterate whose standard deviations differ least."""
    rows, columns = np.ones((len(x), 1)), np.ones((1, x.shape[1]))
    best = (math.inf, rows, columns)
    for _ in range(17):
        y = x / rows / columns
        spread = sum(std.max() / std.min() for std in (y.std(1, ddof=1), y.std(0, ddof=1)))
        if spread <= best[0]:
            best = (spread, rows, columns)
        columns = np.maximum(columns * y.std(0, ddof=1), math.exp(-0.3))
        rows = np.maximum(rows * (x / rows / columns).std(1, ddof=1)[:, None], math.exp(-0.3))
    assert best[0] < 3, "the iteration balances nothing"
    return best[1], best[2]


def kvarn(x: np.ndarray, bits: int) -> np.ndarray:
    """Groups are rows."""
    rows, columns = kvarn_scales(x)
    y = x / rows / columns
    low = y.min(1, keepdims=True)
    scale = (y.max(1, keepdims=True) - low) / (2**bits - 1)
    return (np.round((y - low) / scale) * f16(rows * scale) + f16(rows * low)) * f16(columns)


@pytest.mark.parametrize(("name", "key_bits", "value_bits"), [("kvarn_k4v2", 4, 2), ("kvarn_k2v2", 2, 2)])
def test_kvarn(name: str, key_bits: int, value_bits: int, tile: np.ndarray) -> None:
    x = 4 * tile.astype(np.float64) @ sylvester(D)
    keys, values = through(name, 4 * tile)
    # of iterates that are equally good, float32 and float64 may take different ones: then float16 rounds other scales
    agree((keys @ sylvester(D)).T, kvarn(x.T, key_bits), 2**-10)
    agree(values @ sylvester(D), kvarn(x, value_bits), 2**-10)


def e4m3() -> np.ndarray:
    """All that are not negative, in order: 0 to 2^-6 in steps of 2^-9, then 8 per power of two, up to 448."""
    return np.array([b * 2.0**-9 if b < 8 else (8 + b % 8) * 2.0 ** (b // 8 - 10) for b in range(127)])


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
def test_e4m3(rounding: str, tile: np.ndarray) -> None:
    known = e4m3()
    assert (known[1], known[8], known[-1]) == (2.0**-9, 2.0**-6, 448)
    x = np.concatenate([tile[:-2], 1e-3 * tile[-2:-1], 1e3 * tile[-1:]])
    assert (np.abs(x) > 448).any()
    assert (np.abs(x) < 2.0**-7).any()
    below = np.searchsorted(known, np.abs(x), side="right") - 1
    want = known[below]
    if rounding == "nearest":
        above = known[np.minimum(below + 1, len(known) - 1)]
        # a tie goes to the even byte
        tie = np.abs(x) - want == above - np.abs(x)
        up = np.where(tie, below % 2 == 1, np.abs(x) - want > above - np.abs(x))
        want = np.where(up, above, want)
    for got in through("e4m3_unscaled", x, e4m3_rounding=rounding):
        assert np.array_equal(got, np.sign(x) * want)


def test_e4m3_calibrated(tile: np.ndarray) -> None:
    """One scale for all heads of a layer, from another text's largest number; larger numbers are clipped."""
    other = torch.randn(10, 4, D), 3 * torch.randn(10, 2, D), torch.randn(10, 2, D)
    other[1][4, 0, 7], other[2][2, 1, 3] = 30.0, -6.0
    x = torch.from_numpy(tile)[:, None].repeat(1, 2, 1)
    x[3, 1, 9] = 99.0
    hats = roundtrip("e4m3_calibrated", x, x, calibration=Calibration(*other))
    for hat, largest in zip(hats, (30.0, 6.0), strict=True):
        scale = np.float32(largest) / np.float32(448)
        want = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.allclose(hat, want, rtol=1e-6)
        assert hat[3, 1, 9] == pytest.approx(largest)


def test_nvfp4(tile: np.ndarray) -> None:
    page = np.float32(np.abs(tile).max() / (6 * 448))
    block = np.abs(tile).reshape(N, -1, 16).max(-1, keepdims=True) / (6 * page)
    scale = torch.from_numpy(block).to(torch.float8_e4m3fn).double().numpy() * page
    known = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    y = tile.reshape(N, -1, 16) / scale
    want = (np.sign(y) * known[np.abs(np.abs(y)[..., None] - known).argmin(-1)] * scale).reshape(N, D)
    for got in through("nvfp4_block", tile):
        agree(got, want)


def test_nvfp4_rounds_ties_to_the_even_code() -> None:
    """As the hardware's conversion does: 0.25 to 0, 0.75 to 1, 1.25 to 1, ..., 5 to 4."""
    x = np.zeros((N, D), np.float32)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x[0, : len(ties)] = ties
    x[0, 8 : 8 + len(ties)] = [-t for t in ties]
    x[:, 15] = 6.0  # a scale of 1 for this block ...
    x[0, 127] = 6 * 448  # ... because the page's is 1
    got = through("nvfp4_block", x)[0][0]
    assert got[: len(ties)].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert got[8 : 8 + len(ties)].tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_peers_get_no_sinks_of_ours() -> None:
    """Each format says how many sinks it ships with, and most have none."""
    assert all("S" in FORMATS[name].defaults for name in PEERS)
    assert FORMATS["int4_token"].settings().S == FORMATS["nvfp4_block"].settings().S == 0


def test_sinks_are_all_that_kivi_gets() -> None:
    for kivi in ("kivi2", "kivi4"):
        plain, sinks = (FORMATS[name].bind(Geometry(D, N)) for name in (kivi, f"{kivi}_sinks"))
        assert (plain.S, sinks.S) == (4, 32)
        assert plain.W == sinks.W
        assert plain.slab_region == sinks.slab_region


# -- constants -------------------------------------------------------------------------------------------------------
CALIBRATED = [name for name in PEERS if FORMATS[name].keys.calibrated]


def layer(seed: int, heads: int = 2) -> Calibration:
    """Heads that look in different directions, each in few."""
    generator = torch.Generator().manual_seed(seed)
    mixing = (
        torch.randn(3, heads, 64, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, 64)[:, None]
    )
    x = torch.randn(3, 128, 2 * heads, 64, generator=generator)
    q = torch.einsum("thd,hde->the", x[0], mixing[0].repeat_interleave(2, 0))
    return Calibration(q, *(torch.einsum("thd,hde->the", x[i, :, :heads], mixing[i]) for i in (1, 2)))


@pytest.mark.parametrize("name", CALIBRATED)
def test_nothing_is_packed_without_constants(name: str) -> None:
    other = layer(1)
    with pytest.raises(ValueError, match=f"{name} has constants that are fitted to another text"):
        roundtrip(name, other.key, other.value)
    page = FORMATS[name].bind(Geometry(64, 64, torch.float32))
    with pytest.raises(ValueError, match=f"{name} has constants that are fitted to another text, and none are given"):
        page.pack(torch.zeros(2, 64, 64), torch.zeros(2, 64, 64), None)


@pytest.mark.parametrize(("name", "options"), [*((n, {}) for n in CALIBRATED), ("oscar2", {"oscar_rotation": "head"})])
def test_heads_have_their_own_constants(name: str, options: dict[str, Any]) -> None:
    """Each of two heads gives the same as by itself with its part of the layer's constants."""
    fitted, text = layer(1), layer(2)
    page = FORMATS[name].bind(Geometry(64, 64, torch.float32), options).calibrated_on(fitted)
    assert page.geometry.constants is not None
    both = through_pages(page, text.key, text.value, None)
    for h in range(2):
        own = page.with_constants(page.geometry.constants.each(lambda x, h=h: x[h : h + 1]))
        alone = through_pages(own, text.key[:, h : h + 1], text.value[:, h : h + 1], None)
        for a, b in zip(both, alone, strict=True):
            assert torch.equal(a[:, h : h + 1], b)


def test_oscars_rotation_of_one_head() -> None:
    """With "head" each head's rotation is the one that its layer would have if it had no other head."""
    fitted = layer(1)
    page = FORMATS["oscar2"].bind(Geometry(64, 64, torch.float32), {"oscar_rotation": "head"}).calibrated_on(fitted)
    for h in range(2):
        alone = Calibration(fitted.query[:, 2 * h : 2 * h + 2], fitted.key[:, h : h + 1], fitted.value[:, h : h + 1])
        want = FORMATS["oscar2"].bind(page.geometry).calibrated_on(alone).geometry.constants
        got = page.geometry.constants
        assert got is not None
        assert want is not None
        for ours, theirs in ((got.keys, want.keys), (got.values, want.values)):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours[h], theirs[0])


# -- what they cost --------------------------------------------------------------------------------------------------
# bits per element of keys and of values at d = N = 128: codes, and what is stored with them
COSTS = {
    "int4_token": (4 + 32 / 128, 4 + 32 / 128),  # a float32 per token
    "e4m3_unscaled": (8, 8),
    "e4m3_calibrated": (8, 8),
    "turbo4": (4 + 16 / 128, 4 + 32 / 128),  # a norm per token; scale and zero
    "turbo3": (3 + 16 / 128, 3 + 32 / 128),
    "kvarn_k4v4": (4 + 32 / 128 + 16 / 128, 4 + 32 / 128 + 16 / 128),  # scale and zero one way, a scale the other
    "kvarn_k4v2": (4 + 32 / 128 + 16 / 128, 2 + 32 / 128 + 16 / 128),
    "kvarn_k2v2": (2 + 32 / 128 + 16 / 128, 2 + 32 / 128 + 16 / 128),
    "oscar2": (2 + 32 / 128, 2 + 32 / 128),  # scale and zero per token
    "int4_hadamard_q4_0": (4 + 16 / 32, 4 + 16 / 32),
    "nvfp4_block": (4 + 8 / 16 + 32 / 128 / 128, 4 + 8 / 16 + 32 / 128 / 128),
    "kivi2_sinks": (2 + 32 / 32, 2 + 32 / 32),
    "kivi4_sinks": (4 + 32 / 32, 4 + 32 / 32),
}


def test_every_peer_is_counted() -> None:
    assert set(COSTS) == set(PEERS)


@pytest.mark.parametrize("name", PEERS)
def test_bits(name: str) -> None:
    page = FORMATS[name].bind(Geometry(128, 128))
    assert (page.half_bits_per_element("keys"), page.half_bits_per_element("values")) == COSTS[name]
    # header, and fields that end before their 64-byte boundary
    assert 0 <= page.bits_per_element - sum(COSTS[name]) / 2 < 0.07


def test_no_peer_is_offered() -> None:
    assert not {*PEERS} & {*VLLM_DTYPES}
    assert not {*PEERS} & {fmt.name for fmt in public_formats()}
    hidden = {codec for name in PEERS if "kivi" not in name for codec in (FORMATS[name].keys, FORMATS[name].values)}
    assert not hidden & {*key_codecs().values(), *value_codecs().values()}


# -- how well they do ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in PEERS if "kivi" not in n])
@pytest.mark.parametrize("head", HEAD_SIZES)
def test_the_query_is_rotated_as_the_keys_are(name: str, head: int) -> None:
    """Including block-diagonal rotations, where the head size is not a power of two."""
    if name == "oscar2" and head & (head - 1):
        with pytest.raises(ValueError, match=f"whole head, whose size {head} is not a power of two"):
            FORMATS[name].bind(Geometry(head, 64))
        return
    page = FORMATS[name].bind(Geometry(head, FORMATS[name].settings().N or 64))
    key, query = torch.randn(1, page.N, page.geometry.d), torch.randn(1, 5, page.geometry.d)
    page = page.calibrated_on(Calibration(query.transpose(0, 1), *(torch.randn(9, 1, page.geometry.d) for _ in "kv")))
    fields = page.pack(key, key, None)
    keys, values = page.unpack(fields)
    assert (keys - key).norm() < 0.65 * key.norm()
    assert (values - key).norm() < 0.65 * key.norm()
    scores = page.keys.query_features(query) @ page.keys.key_features(fields).mT
    assert torch.allclose(scores, query @ keys.mT, atol=1e-3)


@pytest.mark.parametrize("head", HEAD_SIZES)
def test_hadamard(head: int) -> None:
    d = Geometry(head, 64).d
    h = hadamard(d)
    b = d & -d
    assert torch.equal(h, h.T)
    assert torch.allclose(h @ h, torch.eye(d), atol=1e-6)
    assert np.array_equal(h[-b:, -b:].numpy(), sylvester(b).astype(np.float32))


# (better, worse, least ratio of the errors of q . K)
ORDER = [
    ("turbo4", "turbo3", 1.8),
    ("kvarn_k4v2", "kvarn_k2v2", 4),
    ("int4_hadamard_q4_0", "int4_token", 1.1),  # groups of 32 channels, not of 128
    ("kvarn_k4v4", "int4_token", 1.4),  # ranges of channels
    ("turbo3", "kvarn_k2v2", 1.2),
]


@pytest.mark.parametrize(("better", "worse", "ratio"), ORDER)
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_order(better: str, worse: str, ratio: float, rope: bool) -> None:
    query, key, value = attention_data(128, tokens=128, rope=rope)
    low, high = (score_error(query, key, roundtrip(name, key, value)[0]) for name in (better, worse))
    assert high > ratio * low


def test_a_scale_per_token_pays_where_tokens_differ() -> None:
    """KVarN's finding: tokens of unequal size are what its second scale repairs."""
    query, key, value = attention_data(128, tokens=128)
    uneven = key * torch.logspace(-0.7, 0.7, 128)[torch.randperm(128)][:, None, None]
    ratios = [
        score_error(query, x, roundtrip("kvarn_k2v2", x, value)[0])
        / score_error(query, x, roundtrip("kivi2", x, value)[0])
        for x in (key, uneven)
    ]
    assert ratios[1] < 0.8 * ratios[0]

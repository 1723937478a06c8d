"""SQuat, QJL and InnerQ a second time, from the papers' formulas in float64 NumPy.

The engine's oracle reads and writes pages with the product's own codecs: a mistake in what these define is on both
sides of it. Here nothing is taken from a codec but its bytes, and QJL's random sketch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.methods.qjl import SketchKeys, sphere_constant
from vllm_kvq.formats.methods.squat import PLAIN
from vllm_kvq.formats.parts.rope import Rope

Array = np.ndarray
HEADS = 2
CHUNKS = (1, 2, 40, 7, 150)
LAMBDA = 1e-3


def bound(name: str, d: int = 64, **options: object) -> PageFormat:
    return get_format(name).bind(Geometry(d, 64, torch.float32), options)


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x, dtype=np.float32))


def chunked(fmt: PageFormat, queries: Array, keys: Array, chunks: Sequence[int]) -> torch.Tensor:
    """The state after a prompt of (heads, tokens, d) that comes in chunks, each with one query per key."""
    state = None
    for at in np.split(np.arange(sum(chunks)), np.cumsum(chunks)[:-1]):
        state = fmt.keys.fit(tensor(queries[:, at]), tensor(keys[:, at]), state)
    assert state is not None
    return state


def codes_of(data: torch.Tensor, bits: int) -> Array:
    """(quads, 32, 4) bytes of one slab -> (32, n) codes: plane p of byte i is the code of channel i + p n b / 8."""
    quads = data.numpy().astype(np.int64)
    channels = len(quads) * 4
    row = np.stack([quads[i // 4, :, i % 4] for i in range(channels)], axis=1)
    return np.concatenate([row >> (bits * p) & (2**bits - 1) for p in range(8 // bits)], axis=1)


def asymmetric(x: Array, axis: int, bits: int) -> tuple[Array, Array]:
    """(scale, zero) as they are stored."""
    low = x.min(axis, keepdims=True)
    scale = (x.max(axis, keepdims=True) - low) / (2**bits - 1)
    return scale.astype(np.float16).astype(np.float64), low.astype(np.float16).astype(np.float64)


# -- SQuat ------------------------------------------------------------------------------------------------------------
def subspace(queries: Array, rank: int) -> Array:
    """Section 3.2: the top singular vectors of the stacked queries, scaled by their singular values."""
    _, s, vh = np.linalg.svd(queries, full_matrices=False)
    return s[:rank, None] * vh[:rank]


def squat(k: Array, q_hat: Array, g: int, bits: int, lam: float = LAMBDA) -> tuple[Array, Array]:
    """Lemma 2's problem, solved as it stands, by least squares: (deq(qtz(k)), which codes are a matter of rounding).

    In iteration t:  min |k_t - k_(t-1)|^2 + lambda |Q (k_t - k_(t-1))|^2  over the channels that are still open, those
    up to t being fixed.
    """
    d = k.shape[1]
    problem = np.vstack([np.eye(d), math.sqrt(lam) * q_hat])
    k_t, close = k.copy(), np.zeros(k.shape, bool)
    for start in range(0, d, g):
        now, rest = slice(start, start + g), slice(start + g, d)
        scale, zero = asymmetric(k_t[:, now], 0, bits)
        place = (k_t[:, now] - zero) / scale
        close[:, now] = np.abs(place - np.floor(place) - 0.5) < 1e-2
        change = np.zeros_like(k)
        change[:, now] = zero + scale * np.clip(np.rint(place), 0, 2**bits - 1) - k_t[:, now]
        if start + g < d:
            change[:, rest] = np.linalg.lstsq(problem[:, rest], -problem @ change.T, rcond=None)[0].T
        k_t += change
    return k_t, close


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("chunks", [CHUNKS, (200,)], ids=["chunks", "whole"])
def test_squat_subspace_is_that_of_all_queries(rank: int, chunks: tuple[int, ...]) -> None:
    """Queries of the subspace's own rank, so that chunks lose nothing. Rows have no sign: Q^T Q is what they mean."""
    rng = np.random.default_rng(1)
    # later chunks are stronger and point elsewhere, so that fitting to just the first or just the last would not do
    mixture = rng.standard_normal((HEADS, 200, rank)) * np.linspace(0.2, 3, 200)[:, None]
    queries = mixture @ rng.standard_normal((HEADS, rank, 64))
    state = chunked(bound("squat2", r=rank), queries, queries, chunks).double().numpy()[:, :-1]
    for head in range(HEADS):
        want = subspace(queries[head], rank)
        np.testing.assert_allclose(np.linalg.norm(state[head], axis=1), np.linalg.norm(want, axis=1), rtol=1e-4)
        np.testing.assert_allclose(state[head].T @ state[head], want.T @ want, atol=1e-4 * np.abs(want.T @ want).max())


def test_squat_chunks_are_merged_through_the_subspace() -> None:
    """Queries of full rank: each chunk is stacked below the subspace of the chunks before it."""
    queries = np.random.default_rng(2).standard_normal((HEADS, 200, 64)) * np.logspace(0.5, -0.5, 64)
    state = chunked(bound("squat2", r=5), queries, queries, CHUNKS).double().numpy()[:, :-1]
    for head in range(HEADS):
        want = np.zeros((0, 64))
        for part in np.split(queries[head], np.cumsum(CHUNKS)[:-1]):
            want = subspace(np.vstack([want, part]), 5)
        np.testing.assert_allclose(state[head].T @ state[head], want.T @ want, atol=1e-3 * np.abs(want.T @ want).max())


@pytest.mark.parametrize("g", [16, 32])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("floor", [0, 4])
@pytest.mark.parametrize("chunks", [CHUNKS, (200,)], ids=["chunks", "whole"])
def test_squat_bytes_solve_the_papers_problem(g: int, bits: int, floor: int, chunks: tuple[int, ...]) -> None:
    """From a prompt in chunks to the bytes of a page, whose keys are read here byte by byte.

    With a floor lambda is at most 1 / (floor * noise), the noise being the energy outside the subspace per direction.
    """
    rng = np.random.default_rng(3)
    queries = 6 * rng.standard_normal((HEADS, 200, 5)) @ rng.standard_normal((HEADS, 5, 64))
    if len(chunks) == 1:  # chunks of such queries forget what they cut off
        queries += 2 * rng.standard_normal(queries.shape)
    keys = rng.standard_normal((HEADS, 64, 64)) * (1 + 3 * rng.random(64)) + 2 * rng.standard_normal(64)
    keys = keys.astype(np.float32).astype(np.float64)
    fmt = bound("squat2", **PLAIN, key_bits=bits, g=g, floor=floor)
    packed = fmt.keys.pack(tensor(keys), chunked(fmt, queries, queries, chunks))
    lambdas = compare_with_the_paper(packed, keys, queries, g, bits, floor)
    assert [lam < LAMBDA for lam in lambdas] == [floor > 0 and len(chunks) == 1] * HEADS


def compare_with_the_paper(
    packed: dict[str, torch.Tensor], keys: Array, queries: Array, g: int, bits: int, floor: float
) -> list[float]:
    """Two slabs of each head against Lemma 2's problem for these keys and queries; the lambda that each head had."""
    open_tokens, corrected, lambdas = [], [], []
    for head in range(HEADS):
        q_hat = subspace(queries[head], 5)
        noise = (np.square(queries[head]).sum() - np.square(q_hat).sum()) / (64 - 5)
        lam = min(LAMBDA, 1 / (floor * noise)) if floor * noise > 1 else LAMBDA
        lambdas.append(lam)
        for slab in range(2):
            k = keys[head, 32 * slab : 32 * (slab + 1)]
            scale, zero = (packed[n][head, slab].double().numpy() for n in ("k_scale", "k_zero"))
            got = zero + scale * codes_of(packed["k_codes"][head, slab], bits)
            want, close = squat(k, q_hat, g, bits, lam)
            wrong = np.abs(got - want) > 1e-3
            free = np.ones(32, bool)
            for start in range(0, 64, g):
                at = slice(start, start + g)
                # after a code that rounding decides, the token's later blocks differ, and so may the scales
                assert not (wrong[:, at] & ~close[:, at])[free].any()
                free &= ~wrong[:, at].any(1)
            open_tokens.append(free.mean())
            plain_scale, plain_zero = asymmetric(k, 0, bits)
            plain = plain_zero + plain_scale * np.clip(np.rint((k - plain_zero) / plain_scale), 0, 2**bits - 1)
            q = queries[head]
            corrected.append(np.linalg.norm((got - k) @ q.T) / np.linalg.norm((plain - k) @ q.T))
    assert np.mean(open_tokens) > 0.9
    assert np.mean(corrected) < 0.85, "so weak a correction could as well be missing"
    return lambdas


def turned(x: Array, position: Array, pairing: str, rotary: int, stretch: float = 1.0) -> Array:
    """RoPE of (heads, tokens, d): pair j of token t, as a complex number, times stretch * e^(i t theta_j)."""
    at = np.arange(rotary // 2)
    real, imaginary = (at, at + rotary // 2) if pairing == "half" else (2 * at, 2 * at + 1)
    turn = stretch * np.exp(1j * position[:, None] * 10_000.0 ** (-2 * at / rotary))
    pairs = (x[..., real] + 1j * x[..., imaginary]) * turn
    out = x.copy()
    out[..., real], out[..., imaginary] = pairs.real, pairs.imag
    return out


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("rotary", "stretch"), [(64, 1.0), (32, 1.3)], ids=["whole", "part, scaled"])
def test_squat_pre_solves_the_papers_problem_before_rope(pairing: str, rotary: int, stretch: float) -> None:
    """Section 4: keys are stored as they are before RoPE, which is applied to what is dequantized. The queries that U
    is made of are those before RoPE, too. The prompt comes in two chunks, and its tokens from 64 on are packed."""
    rng, tokens = np.random.default_rng(4), np.arange(200)
    queries = 6 * rng.standard_normal((HEADS, 200, 5)) @ rng.standard_normal((HEADS, 5, 64))
    keys = rng.standard_normal((HEADS, 200, 64)) * (1 + 3 * rng.random(64)) + 2 * rng.standard_normal(64)
    angle = tokens[:, None] * 10_000.0 ** (-np.arange(0, rotary, 2) / rotary)
    rope = Rope(tensor(stretch * np.hstack([np.cos(angle), np.sin(angle)])), pairing)
    options = {**PLAIN, "rope": "before", "g": 32, "floor": 0}
    fmt = get_format("squat2").bind(Geometry(64, 64, torch.float32, rope=rope), options)
    q, k = (turned(x, tokens, pairing, rotary, stretch) for x in (queries, keys))
    state = None
    for at in (slice(0, 70), slice(70, 200)):
        got = (fmt.before_rope(tensor(x[:, at]), torch.from_numpy(tokens[at])) for x in (q, k))
        state = fmt.keys.fit(*got, state)
    packed = fmt.pack(tensor(k[:, 64:128]), tensor(k[:, 64:128]), state, position=torch.full((HEADS,), 64))
    compare_with_the_paper(packed, keys[:, 64:128], queries, 32, 2, 0)
    stored = np.stack(
        [
            np.concatenate(
                [
                    packed["k_zero"][head, slab].double().numpy()
                    + packed["k_scale"][head, slab].double().numpy() * codes_of(packed["k_codes"][head, slab], 2)
                    for slab in range(2)
                ]
            )
            for head in range(HEADS)
        ]
    )
    want = turned(stored, tokens[64:128], pairing, rotary, stretch)
    np.testing.assert_allclose(fmt.unpack(packed)[0].numpy(), want, atol=1e-4)
    # and not as it was before RoPE, nor one token further
    assert np.abs(stored - want).max() > 1
    assert np.abs(turned(stored, tokens[65:129], pairing, rotary, stretch) - want).max() > 1


# -- QJL --------------------------------------------------------------------------------------------------------------
def on_the_sphere(d: int) -> float:
    """E |u_1| for a unit vector u in R^d, by integration over its angle to the first axis."""
    angle = (np.arange(200_000) + 0.5) / 200_000 * math.pi
    density = np.sin(angle) ** (d - 2)
    return float((np.abs(np.cos(angle)) * density).sum() / density.sum())


@pytest.mark.parametrize("d", [2, 3, 4, 8, 64, 96, 128, 192, 256])
def test_qjl_constant(d: int) -> None:
    """Lemma 3.2 for a row s of length sqrt(d):  1 = c E |<s, k>| / |k|."""
    assert sphere_constant(d) == pytest.approx(1 / (math.sqrt(d) * on_the_sphere(d)), rel=1e-6)
    # Fact 3.4: the Gaussian's is sqrt(pi / 2), from below
    assert 0 < math.sqrt(math.pi / 2) / sphere_constant(d) - 1 < 0.3 / d


def estimates(rows: Array, constant: float, q: Array, k: Array) -> Array:
    """Definition 3.1 and equation (4), one number for each vector."""
    return constant / len(rows) * np.linalg.norm(k, axis=1) * ((q @ rows.T) * np.sign(k @ rows.T)).sum(1)


def orthogonal(rng: np.random.Generator, rows: int, d: int) -> Array:
    """Gaussian rows, made orthogonal by QR in blocks of d, of length sqrt(d)."""
    blocks = []
    for _ in range(-(-rows // d)):
        basis, triangle = np.linalg.qr(rng.standard_normal((d, d)))
        blocks.append(math.sqrt(d) * (basis * np.sign(np.diag(triangle))).T)
    return np.concatenate(blocks)[:rows]


@pytest.mark.parametrize("d", [4, 64])
def test_qjl_constant_by_trial(d: int) -> None:
    """With Gaussian and with orthogonal rows of our own, each constant is right for its rows and wrong for the other's.

    Where q = k the estimate is  c / m sum |<s, k>| |k|,  which varies least.
    """
    rng = np.random.default_rng(4)
    k = rng.standard_normal((16, d))
    q = k + 0.5 * rng.standard_normal((16, d))
    exact = (q * k).sum(1)
    gauss, sphere = math.sqrt(math.pi / 2), sphere_constant(d)
    trials = {
        "gauss": [estimates(rng.standard_normal((2 * d, d)), gauss, q, k) / exact for _ in range(20_000 // d)],
        "orthogonal": [estimates(orthogonal(rng, 2 * d, d), sphere, q, k) / exact for _ in range(20_000 // d)],
    }
    for ratios in trials.values():
        means = np.mean(ratios, axis=1)
        error = means.std() / math.sqrt(len(means))
        assert abs(means.mean() - 1) < 4 * error
        assert error < 0.01
    own = [estimates(orthogonal(rng, 2 * d, d), 1.0, k, k) / (k * k).sum(1) for _ in range(20_000 // d)]
    error = np.std(np.mean(own, axis=1)) / math.sqrt(len(own))
    assert np.mean(own) == pytest.approx(1 / sphere, abs=4 * error)
    assert abs(1 / gauss - 1 / sphere) > 8 * error, "this many trials could not tell the constants apart"


def test_qjl_scores_are_the_papers_estimator() -> None:
    """A page's bits, norms and indices, read byte by byte; and queries that the codec prepares."""
    rng = np.random.default_rng(5)
    fmt = bound("qjl3")
    codec, d, n = fmt.keys, 64, 4
    assert isinstance(codec, SketchKeys)
    keys, queries = rng.standard_normal((HEADS, 64, d)), rng.standard_normal((HEADS, 9, d))
    keys[:, :, [3, 17, 40, 63]] *= 8
    fields = codec.pack(tensor(keys), codec.fit(tensor(keys), tensor(keys), None))
    got = codec.query_features(tensor(queries)) @ codec.key_features(fields).transpose(1, 2)
    again = tensor(queries) @ codec.unpack(fields).transpose(1, 2)
    cpu = torch.device("cpu")
    s, s_out = (x.double().numpy() for x in (codec.sketch(cpu), codec.sketch_out(cpu)))
    assert (s.shape, s_out.shape) == ((2 * d, d), (d, n))
    for head in range(HEADS):
        for slab in range(2):
            at = slice(32 * slab, 32 * (slab + 1))
            k, q = keys[head, at].astype(np.float32).astype(np.float64), queries[head]
            out = np.sort(np.argsort((keys[head] ** 2).sum(0))[-n:])
            assert fields["ko_index"][head, slab].tolist() == out.tolist() == [3, 17, 40, 63]
            inner = k.copy()
            inner[:, out] = 0
            want = np.zeros((9, 32))
            for part, query, rows, bits, norm, size in (
                (inner, np.where(np.isin(np.arange(d), out), 0, q), s, "k_bits", "k_norm", d),
                (k[:, out], q[:, out], s_out, "ko_bits", "ko_norm", n),
            ):
                stored = codes_of(fields[bits][head, slab], 1)
                projected = part @ rows.T
                assert not ((stored != (projected > 0)) & (np.abs(projected) > 1e-4)).any()
                length = fields[norm][head, slab].double().numpy()
                np.testing.assert_allclose(length, np.linalg.norm(part, axis=1), rtol=1e-3)
                constant = 1 / (math.sqrt(size) * on_the_sphere(size))
                want += constant / len(rows) * length * ((query @ rows.T) @ (2 * stored - 1).T)
            for found in (got, again):
                np.testing.assert_allclose(found[head, :, at].double().numpy(), want, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("chunks", [(20, 20), (1, 2, 40, 7, 150), (31, 1)], ids=str)
def test_qjl_outliers_are_those_of_all_chunks(chunks: tuple[int, ...]) -> None:
    """Section 4: the largest channels of the prompt's keys, here by their norm over all of it."""
    rng = np.random.default_rng(6)
    total = sum(chunks)
    keys = rng.standard_normal((HEADS, total, 64))
    # four channels are large throughout; others are larger, but only in the last chunk or the first
    keys[:, :, [5, 20, 33, 50]] *= 6
    keys[:, : chunks[0], 1] = 4 * np.sqrt(0.5 * total / chunks[0])
    keys[:, -chunks[-1] :, 2] = 4 * np.sqrt(0.5 * total / chunks[-1])
    fmt = bound("qjl3")
    later = rng.standard_normal((HEADS, 64, 64))
    later[:, :, 60:] *= 50
    index = fmt.keys.pack(tensor(later), chunked(fmt, keys, keys, chunks))["ko_index"]
    for head in range(HEADS):
        want = np.sort(np.argsort((keys[head] ** 2).sum(0))[-4:]).tolist()
        assert want == [5, 20, 33, 50]
        assert index[head].tolist() == [want, want]


# -- InnerQ -----------------------------------------------------------------------------------------------------------
def hybrid(group: Array, bits: int) -> Array:
    """Equations (10) to (12) and the symmetric mode, of which a group takes the one with the smaller error."""
    top = 2**bits - 1
    zero = group.min()
    scale = float(np.float16((group.max() - zero) / top))
    asym = zero + scale * np.clip(np.rint((group - zero) / scale), 0, top)
    scale = float(np.float16(np.abs(group).max() / top))
    sym = scale * np.clip(np.rint(group / scale), -top, top)
    return sym if ((sym - group) ** 2).sum() < ((asym - group) ** 2).sum() else asym


@pytest.mark.parametrize("bits", [2, 4])
def test_innerq_keys_are_the_papers(bits: int) -> None:
    """norm_i = sqrt(max |K_i|) over all chunks; K / norm in groups of 32 channels of a token; times the norm again."""
    rng = np.random.default_rng(7)
    prompt = rng.standard_normal((HEADS, 200, 64)) * np.logspace(-1, 1, 64)
    # the largest of each channel lies in any of the chunks
    prompt[:, rng.integers(0, 200, 64), np.arange(64)] *= 9
    fmt = bound("innerq2", key_bits=bits)
    state = chunked(fmt, prompt, prompt, CHUNKS)
    keys = rng.standard_normal((HEADS, 64, 64)) * np.logspace(-1, 1, 64) + 0.5
    packed = fmt.keys.pack(tensor(keys), state)
    got = fmt.keys.unpack(packed).double().numpy()
    different = []
    for head in range(HEADS):
        norm = np.sqrt(np.abs(prompt[head].astype(np.float32)).max(0)).astype(np.float16).astype(np.float64)
        stored = packed["k_inner_norm"][head].double().numpy()
        np.testing.assert_allclose(stored, norm, rtol=1e-3)
        for token in range(64):
            x = keys[head, token].astype(np.float32) / stored
            want = np.concatenate([hybrid(g, bits) for g in x.reshape(2, 32)]) * stored
            different.append(np.abs(got[head, token] - want).max() > 1e-3 * np.abs(want).max())
    # a tie between two codes or between the two modes may fall to either side
    assert np.mean(different) < 0.02


def test_innerq_values_are_the_papers() -> None:
    """Groups of 32 tokens of a channel, without a norm."""
    values = np.random.default_rng(8).standard_normal((HEADS, 64, 64)) + np.linspace(0, 3, 64)
    codec = bound("innerq2").values
    got = codec.unpack(codec.pack(tensor(values), None)).double().numpy()
    x = values.astype(np.float32).astype(np.float64)
    want = np.stack([[[hybrid(g, 2) for g in column.reshape(2, 32)] for column in head.T] for head in x])
    want = want.reshape(HEADS, 64, 64).transpose(0, 2, 1)
    assert (np.abs(got - want) > 1e-3).mean() < 0.005

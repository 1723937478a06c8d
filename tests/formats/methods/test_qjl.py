"""QJL: the sketches, the estimator's bias, the outliers' own sketch."""

import hashlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.formats import FORMATS, Geometry, roundtrip
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.methods.qjl import MOST_NAMED, SketchKeys, sketch, sphere_constant


def codec(d: int = 128, layer: int = 0, seed: int = 42, **options: int | str) -> SketchKeys:
    keys = FORMATS["qjl3"].bind(Geometry(d, 64, layer=layer), {"seed": seed, **options}).keys
    assert isinstance(keys, SketchKeys)
    return keys


@pytest.mark.parametrize(("rows", "d"), [(256, 128), (128, 128), (128, 8), (100, 64), (192, 96), (32, 1), (5, 64)])
def test_rows_are_orthogonal_in_blocks(rows: int, d: int) -> None:
    s = sketch(rows, d, 3).double()
    assert s.shape == (rows, d)
    for block in s.split(d):
        assert torch.allclose(block @ block.T, d * torch.eye(len(block), dtype=torch.float64), atol=1e-4 * d)
    if rows > d > 1:
        assert (s[:d] @ s[d : 2 * d].T).abs().max() > 0.05 * d, "the blocks are not independent"


@pytest.mark.parametrize("d", [4, 8, 64])
def test_rows_are_uniform_on_the_sphere(d: int) -> None:
    """As Gram-Schmidt gives them; a plain QR would bias the first coordinates by its signs."""
    s = torch.stack([sketch(d, d, seed) for seed in range(300)]).double()
    mean = s.mean(0)
    # a mean of 300 numbers of variance 1
    assert mean.abs().max() < 6 / math.sqrt(300)
    assert s.diagonal(dim1=1, dim2=2).mean().abs() < 6 / math.sqrt(300 * d)


HASH = "import numpy as np, hashlib; from vllm_kvq.formats.methods.qjl import sketch; s = sketch(256, 128, 7).numpy(); "


def test_the_same_in_every_process() -> None:
    """Bit for bit between processes; the literal covers 10 binary places, so that it holds on every
    machine."""
    code = HASH + "print(hashlib.sha256(s.tobytes()).hexdigest())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    s = sketch(256, 128, 7).numpy()
    assert run.stdout.strip() == hashlib.sha256(s.tobytes()).hexdigest()
    places = np.round(s * 1024).astype("<i2")
    assert hashlib.sha256(places.tobytes()).hexdigest()[:32] == "a5810a847c718669e6cb7d8e6d0f78bd"


def test_layers_and_seeds_have_their_own_sketches() -> None:
    device = torch.device("cpu")
    seen = set()
    for layer in range(4):
        for seed in (0, 1, 42):
            c = codec(layer=layer, seed=seed)
            seen.add(hashlib.sha256(c.sketch(device).numpy().tobytes()).hexdigest())
            seen.add(hashlib.sha256(c.sketch_out(device).numpy().tobytes()).hexdigest())
    assert len(seen) == 24
    # nor do they draw from the same random stream
    assert len({codec(layer=i).seed + out for i in range(100) for out in (0, 1)}) == 200
    assert torch.equal(codec(layer=3).sketch(device), codec(layer=3).sketch(device))
    codec(seed=2**31 - 1, layer=200).sketch_out(device)


def test_constant() -> None:
    """c(d) = sqrt(d) / E|s_1| for s uniform on the sphere of radius sqrt(d); the Gaussian's is 1.002 and
    1.004 times as large."""
    gauss = math.sqrt(math.pi / 2)
    assert gauss / sphere_constant(128) == pytest.approx(1.002, abs=5e-4)
    assert gauss / sphere_constant(64) == pytest.approx(1.004, abs=5e-4)
    assert sphere_constant(1) == pytest.approx(1)
    assert sphere_constant(2) == pytest.approx(math.pi / math.sqrt(2) / 2)
    assert sphere_constant(256) < gauss


def test_estimator_is_unbiased() -> None:
    """Over 300 layers' sketches and 32 pairs at cos 0.8. The Gaussian's constant fails the same test by
    far."""
    d, n, g = 64, 4, torch.Generator().manual_seed(0)
    key = torch.randn(1, 32, d, generator=g)
    key[..., :n] *= 20  # the outliers, so that every slab chooses the same ones
    query = key.clone()
    query[..., :n] += 0.75 * key[..., :n].norm(dim=-1, keepdim=True) * unit(torch.randn(1, 32, n, generator=g))
    query[..., n:] += 0.75 * key[..., n:].norm(dim=-1, keepdim=True) * unit(torch.randn(1, 32, d - n, generator=g))
    inner, outer = [], []
    for layer in range(300):
        c = codec(d, layer)
        fields = c.pack(key, None)
        assert fields["ko_index"].tolist() == [[list(range(n))]]
        product = query * c.unpack(fields)
        inner.append((product[..., n:].sum(-1) / (query * key)[..., n:].sum(-1)).mean())
        outer.append((product[..., :n].sum(-1) / (query * key)[..., :n].sum(-1)).mean())
    for part, size in ((inner, d), (outer, n)):
        ratio = torch.stack(part).double()
        error = (ratio.std() / math.sqrt(len(ratio))).item()
        bias = ratio.mean().item() - 1
        assert abs(bias) < 3 * error + 1e-4  # the norms are stored in float16
        gauss = math.sqrt(math.pi / 2) / sphere_constant(size)
        assert abs((1 + bias) * gauss - 1) > 3 * error + 1e-4, "this test could not see a wrong constant"


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("d", [d for d in HEAD_SIZES if d <= MOST_NAMED])
@pytest.mark.parametrize("options", [{}, {"m": 64, "m_out": 32, "outliers": 3}], ids=str)
def test_features_score_like_the_reconstruction(d: int, options: dict[str, int]) -> None:
    c = codec(d, **options)
    g = torch.Generator().manual_seed(1)
    key, query = torch.randn(3, 64, c.d, generator=g), torch.randn(3, 5, c.d, generator=g)
    fields = c.pack(key, None)
    want = query @ c.unpack(fields).transpose(1, 2)
    got = c.query_features(query) @ c.key_features(fields).transpose(1, 2)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    assert c.query_features(query).shape[-1] == c.key_features(fields).shape[-1]


def test_stored_numbers() -> None:
    """Bits, norms and indices against the definitions, outliers chosen per slab."""
    c, device = codec(128), torch.device("cpu")
    key = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(2))
    key[0, :32, [3, 50, 127]] *= 30
    key[0, 32:, [0, 64]] *= 30
    fields = c.pack(key, None)
    slabs = key.unflatten(1, (2, 32))
    assert {3, 50, 127} < set(fields["ko_index"][0, 0].tolist())
    assert {0, 64} < set(fields["ko_index"][0, 1].tolist())
    for u in range(2):
        for s in range(2):
            x, at = slabs[u, s], fields["ko_index"][u, s].long()
            assert at.tolist() == sorted(set(at.tolist()))
            assert set(at.tolist()) == set(x.norm(dim=0).argsort(descending=True)[:8].tolist())
            inner = x.clone()
            inner[:, at] = 0
            assert torch.allclose(fields["k_norm"][u, s], inner.norm(dim=-1), rtol=1e-3)
            assert torch.allclose(fields["ko_norm"][u, s], x[:, at].norm(dim=-1), rtol=1e-3)
            for name, part, rows in (
                ("k_bits", inner, c.sketch(device)),
                ("ko_bits", x[:, at], c.sketch_out(device)),
            ):
                bits = part @ rows.T >= 0
                m = len(rows)
                data = fields[name][u, s]
                for t, r in ((0, 0), (5, 17), (31, m - 1), (8, m // 2 + 3)):
                    byte = r % (m // 8)
                    assert (data[byte // 4, t, byte % 4] >> (r // (m // 8)) & 1) == bits[t, r]


def test_scale_of_the_key_is_carried_by_the_norms() -> None:
    c = codec(64)
    key = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(4))
    one, eight = c.unpack(c.pack(key, None)), c.unpack(c.pack(8 * key, None))
    assert torch.allclose(eight, 8 * one, rtol=1e-5, atol=1e-5)


def compact_and_restricted(d: int, n: int, m: int, trials: int = 20) -> tuple[float, float]:
    """rms errors of q_out . k_out / (|q| |k|): S' in the n outlier coordinates, and S' in all d, restricted
    to them."""
    g = torch.Generator().manual_seed(0)
    squares = [0.0, 0.0]
    for trial in range(trials):
        k, q = unit(torch.randn(64, n, generator=g)), unit(torch.randn(64, n, generator=g))
        wide = torch.zeros(64, d)
        wide[:, :n] = k
        own, full = sketch(m, n, 2 * trial), sketch(m, d, 2 * trial + 1)
        # the best constants for each: exact on the sphere of R^n, and the average of the restricted rows'
        hats = (
            sphere_constant(n) / m * torch.where(k @ own.T >= 0, 1.0, -1.0) @ own,
            sphere_constant(d) / m * (torch.where(wide @ full.T >= 0, 1.0, -1.0) @ full)[:, :n],
        )
        for i, hat in enumerate(hats):
            squares[i] += ((hat - k) * q).sum(-1).square().mean().item()
    return (squares[0] / trials) ** 0.5, (squares[1] / trials) ** 0.5


@pytest.mark.parametrize(("d", "n", "least", "most"), [(128, 8, 0.96, 1.03), (64, 4, 0.88, 0.98)])
def test_compact_outlier_sketch_is_no_worse(d: int, n: int, least: float, most: float) -> None:
    """Rows in the outliers' own n dimensions against the same number of d-dimensional rows: the same error
    at d = 128 (in both, the columns are orthogonal), 7 % less at d = 64, for 1/16 of the sketch."""
    compact, restricted = compact_and_restricted(d, n, d, trials=60)
    assert least < compact / restricted < most


# -- which channels are outliers
def test_the_prompt_chooses() -> None:
    """By the norm over all its keys, however it is cut into chunks; pages name the choice in every slab."""
    c, g = codec(64), torch.Generator().manual_seed(5)
    prompt = torch.randn(2, 100, 64, generator=g)
    prompt[0, :, [3, 9, 33, 60]] *= 5
    prompt[1, :, [0, 1, 2, 63]] *= 5
    state = c.fit(prompt, prompt, None)
    chunks = None
    for part in prompt.split([1, 20, 79], dim=1):
        chunks = c.fit(part, part, chunks)
    assert chunks is not None
    torch.testing.assert_close(chunks, state)
    later = torch.randn(2, 64, 64, generator=g)
    later[..., 20:24] *= 30  # outliers that the prompt did not have
    assert c.pack(later, state)["ko_index"].tolist() == [[[3, 9, 33, 60]] * 2, [[0, 1, 2, 63]] * 2]
    assert c.pack(later, None)["ko_index"].tolist() == [[[20, 21, 22, 23]] * 2] * 2


def test_a_short_prompt_leaves_the_choice_to_the_slabs() -> None:
    c, g = codec(64), torch.Generator().manual_seed(6)
    x = torch.randn(1, 64, 64, generator=g)
    x[:, :32, 5] *= 30
    x[:, 32:, 7] *= 30
    for tokens in (1, 31):
        index = c.pack(x, c.fit(x[:, :tokens], x[:, :tokens], None))["ko_index"][0]
        assert [5 in i for i in index.tolist()] == [True, False]
        assert [7 in i for i in index.tolist()] == [False, True]
    index = c.pack(x, c.fit(x[:, :32], x[:, :32], None))["ko_index"][0]
    assert torch.equal(index[0], index[1])


def test_slabs_choose_better_under_rope() -> None:
    """What the fixed choice costs: nothing without RoPE, up to a tenth with it."""
    for d in (64, 128):
        for rope, least, most in ((False, 0.999, 1.001), (True, 1.01, 1.1)):
            query, key, value = attention_data(d, tokens=2048, group=1, rope=rope, seed=1)
            fixed, free = (
                score_error(query[-128:], key, roundtrip("qjl3", key, value, outlier_choice=choice)[0])
                for choice in ("prompt", "slab")
            )
            assert least < fixed / free < most


# -- the paper's other settings
def test_without_outliers_there_is_one_sketch() -> None:
    """By the definition; no bytes are left for outliers, and whatever would concern outliers is refused."""
    c, g = codec(64, outliers=0), torch.Generator().manual_seed(7)
    key, query = torch.randn(2, 64, 64, generator=g), torch.randn(2, 3, 64, generator=g)
    fields = c.pack(key, None)
    assert set(fields) == {f.name for f in c.slab_fields} == {"k_bits", "k_norm"}
    s = sketch(128, 64, c.seed)
    signs = torch.where(key @ s.T >= 0, 1.0, -1.0)
    scores = sphere_constant(64) / 128 * (query @ s.T) @ signs.mT * key.norm(dim=-1)[:, None]
    torch.testing.assert_close(query @ c.unpack(fields).mT, scores, rtol=2e-3, atol=2e-2)  # norms are float16
    torch.testing.assert_close(c.query_features(query) @ c.key_features(fields).mT, scores, rtol=2e-3, atol=2e-2)
    assert c.state_rows == 0
    for option, value in (("m_out", 64), ("outlier_choice", "slab")):
        with pytest.raises(ValueError, match=f"^option '{option}' is set, but it has no effect with 'outliers' 0"):
            FORMATS["qjl3"].bind(Geometry(64, 64), {"outliers": 0, option: value})


def test_independent_rows_have_the_gaussian_constant() -> None:
    """E[s s^T] = 1 without any orthogonality; over 300 layers the estimator is unbiased, and the sphere's constant is
    not."""
    d, trials = 64, 300
    g = torch.Generator().manual_seed(8)
    key = torch.randn(1, 32, d, generator=g)
    query = key + 0.75 * key.norm(dim=-1, keepdim=True) * unit(torch.randn(1, 32, d, generator=g))
    ratios = []
    for layer in range(trials):
        c = FORMATS["qjl3"].bind(Geometry(d, 64, layer=layer), {"sketch": "gaussian", "outliers": 0}).keys
        ratios.append(((query * c.unpack(c.pack(key, None))).sum(-1) / (query * key).sum(-1)).mean())
    ratio = torch.stack(ratios).double()
    error = (ratio.std() / math.sqrt(trials)).item()
    assert abs(ratio.mean().item() - 1) < 3 * error + 1e-4
    assert isinstance(c, SketchKeys)
    assert c.scale * c.m == pytest.approx(math.sqrt(math.pi / 2))
    rows = c.sketch(torch.device("cpu"))
    assert (rows[:d] @ rows[:d].T - d * torch.eye(d)).abs().max() > 0.3 * d, "the rows are orthogonal"
    assert rows.mean().abs() < 0.05
    assert rows.var().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(rows, codec(d, layer=trials - 1, sketch="gaussian").sketch(torch.device("cpu")))

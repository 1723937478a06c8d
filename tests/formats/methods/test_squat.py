"""SQuat against the paper's own formulas: d x d matrices, float64, Lemma 2 and Corollary 1 as printed."""

from collections.abc import Callable

import pytest
import torch

from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.formats import FORMATS, Geometry, roundtrip
from vllm_kvq.formats.methods.kivi import ChannelKeys
from vllm_kvq.formats.methods.squat import PLAIN, SQuatKeys
from vllm_kvq.formats.parts.quant import affine_codes, affine_parameters

LAMBDA = 1e-3
FLOOR = 4
Quantizer = Callable[[torch.Tensor], torch.Tensor]


def rounding(bits: int) -> Quantizer:
    """deq(quant(x)) of a (32, g) block as stored: parameters from the float32 copy."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        scale, zero = affine_parameters(x, 0, bits)
        return torch.addcmul(zero, affine_codes(x, scale, zero, bits), scale).double()

    return apply


def squat_keys(
    d: int, bits: int = 2, rank: int = 5, g: int | None = None, lam: float = LAMBDA, floor: int = FLOOR
) -> SQuatKeys:
    options = {
        "key_bits": bits,
        "boost": "none",
        "token_scale": "none",
        "rope": "after",
        "r": rank,
        "lam": lam,
        "floor": floor,
        "g": g,
    }
    return SQuatKeys(Geometry(d, 64), options)


def state_of(u: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
    """(..., r, d) with the row that holds the noise; without noise the rule is the paper's."""
    return torch.cat([u, torch.full_like(u[..., :1, :], noise)], dim=-2)


def smooth(x: torch.Tensor) -> torch.Tensor:
    """A stand-in for rounding that is continuous: float32 and float64 can then be compared without ties."""
    return x + 0.3 * torch.sin(7 * x)


def dense(k: torch.Tensor, u: torch.Tensor, g: int, quantize: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Lemma 2 on (32, d): k_hat, and what was fed to the quantizer. P_inv = [[A_t, B_t^T], [B_t, C_t]]."""
    d = k.shape[1]
    k_hat, fed = k.double().clone(), torch.empty(k.shape, dtype=torch.float64)
    p_inv = torch.linalg.inv(torch.eye(d, dtype=torch.float64) + LAMBDA * u.double().T @ u.double())
    for end in range(g, d + 1, g):
        fed[:, end - g : end] = k_hat[:, end - g : end]
        new = quantize(k_hat[:, end - g : end])
        error, k_hat[:, end - g : end] = new - k_hat[:, end - g : end], new
        h = torch.linalg.inv(p_inv[:end, :end])[:, -g:]  # the last g columns of A_t^-1
        k_hat[:, end:] += error @ (p_inv[end:, :end] @ h).T
    return k_hat, fed


def mixed_up(k: torch.Tensor, u: torch.Tensor, g: int, quantize: Quantizer, form: str) -> torch.Tensor:
    """What the two wrong mixtures of the compact forms feed to the quantizer."""
    k, u = k.double(), u.double()
    d, x = k.shape[1], k.clone()
    z = torch.zeros(len(k), len(u), dtype=torch.float64)
    for end in range(g, d + 1, g):
        at, rest = slice(end - g, end), slice(end, d)
        y = quantize(x[:, at])
        m = torch.linalg.inv(torch.eye(len(u), dtype=torch.float64) / LAMBDA + u[:, rest] @ u[:, rest].T)
        if form == "accumulated error on updated values":
            z += (y - k[:, at]) @ u[:, at].T
            x[:, rest] -= z @ m @ u[:, rest]
        else:  # "newest error on original values"
            x[:, rest] = k[:, rest] - (y - x[:, at]) @ u[:, at].T @ m @ u[:, rest]
    return x


def example(d: int, seed: int = 0, strength: float = 20.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(32, d) keys with unequal channels and a subspace (5, d) whose correction is as large as the rounding
    error."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(32, d, generator=g) * (1 + 3 * torch.rand(d, generator=g)) + 2 * torch.randn(d, generator=g)
    return k, torch.randn(5, d, generator=g) * torch.tensor([8.0, 4, 2, 1, 0.5])[:, None] * strength


class Recorder:
    """Replaces the quantizer inside SQuatKeys, and records what it was fed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quantize: Quantizer) -> None:
        self.fed: list[torch.Tensor] = []

        def fake(_: ChannelKeys, x: torch.Tensor, state: None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            self.fed.append(x)
            one = torch.ones_like(x[..., :1, :])
            return quantize(x).to(x.dtype), one, 0 * one

        monkeypatch.setattr(ChannelKeys, "_quantize", fake)


@pytest.mark.parametrize(("d", "blocks"), [(64, 2), (128, 2), (128, 4), (256, 4), (128, 8), (192, 6), (64, 64)])
def test_the_update_is_the_papers(d: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that reaches the quantizer, with a continuous stand-in for rounding."""
    k, u = example(d)
    _, want = dense(k, u, d // blocks, smooth)
    recorder = Recorder(monkeypatch, smooth)
    squat_keys(d, g=d // blocks)._quantize(k[None, None], state_of(u)[None])
    assert len(recorder.fed) == blocks
    got = torch.cat(recorder.fed, dim=-1)[0, 0]
    assert torch.allclose(got.double(), want, atol=2e-4), (got - want).abs().max()
    # the correction matters: without it only the first block is right
    assert (want - k)[:, d // blocks :].abs().mean() > 0.02


@pytest.mark.parametrize("form", ["accumulated error on updated values", "newest error on original values"])
def test_the_mixed_up_forms_are_told_apart(form: str) -> None:
    """They agree with the truth at two blocks, so only more blocks make a real test."""
    k, u = example(128)
    for blocks, same in ((2, True), (4, False), (8, False)):
        _, want = dense(k, u, 128 // blocks, smooth)
        got = mixed_up(k, u, 128 // blocks, smooth, form)
        assert torch.allclose(got, want, atol=2e-4) == same


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("strength", [1.0, 20.0, 1e3, 1e5])
def test_codes_are_the_papers(bits: int, blocks: int, strength: float) -> None:
    """With the real quantizer, from short prompts to absurdly long ones. A code may differ where the exact
    value lies on the edge of two codes; after such a tie the token's later blocks legitimately differ,
    so it is left out."""
    k, u = example(128, seed=1, strength=strength)
    g = 128 // blocks
    k_hat, fed = dense(k, u, g, rounding(bits))
    codec = squat_keys(128, bits, g=g)
    codes, scale, zero = codec._quantize(k[None, None], state_of(u)[None])
    got = torch.addcmul(zero, codes, scale)[0, 0].double()
    wrong = (got - k_hat).abs() > 1e-6 * (1 + k_hat.abs())
    place = (fed - zero[0, 0]) / scale[0, 0]
    edge = ((place - place.floor() - 0.5).abs() < 1e-2) | ((place.round() - place).abs() < 1e-2)
    open_tokens = torch.ones(32, dtype=torch.bool)
    for block in range(blocks):
        at = slice(block * g, (block + 1) * g)
        assert not (wrong[:, at] & ~edge[:, at])[open_tokens].any()
        open_tokens &= ~wrong[:, at].any(1)
    assert open_tokens.float().mean() > 0.9, "ties can't be that frequent"


def test_correction_takes_the_error_out_of_the_subspace() -> None:
    """What SQuat is for: the residual of queries in the subspace shrinks, at the price of other
    directions."""
    k, u = example(128, seed=2)
    for blocks, most in ((2, 0.85), (4, 0.7), (8, 0.6)):
        # the error of the last block stays: no open channels are left to reduce it
        codec = squat_keys(128, g=128 // blocks)
        plain = codec.unpack(codec.pack(k[None], None))[0] - k
        squat = codec.unpack(codec.pack(k[None], state_of(u)[None]))[0] - k
        assert (squat @ u.T).norm() < most * (plain @ u.T).norm()
        assert squat.norm() < 1.3 * plain.norm()


def test_every_slab_and_unit_has_its_own_state() -> None:
    codec = squat_keys(64, g=32)
    g = torch.Generator().manual_seed(3)
    k, u = torch.randn(3, 64, 64, generator=g), 30 * torch.randn(3, 5, 64, generator=g)
    u = torch.stack([state_of(u[i], noise) for i, noise in enumerate((0, 1e3, 1e5))])
    both = codec.unpack(codec.pack(k, u))
    for i in range(3):
        for slab in (slice(0, 32), slice(32, 64)):
            alone = codec.unpack(codec.pack(k[i : i + 1, slab], u[i : i + 1]))
            assert torch.equal(both[i, slab], alone[0])


@pytest.mark.parametrize("d", [64, 80, 96, 112, 128, 192, 256, 512])
def test_last_block_may_be_smaller(d: int) -> None:
    stored = Geometry(d, 64).d
    for g in (16, 48, 112):
        if g < d:
            codec = squat_keys(d, g=g)
            k, u = example(stored)
            k_hat = codec.unpack(codec.pack(k[None], state_of(u)[None]))[0]
            assert (k_hat - k).norm() < 0.8 * (k - k.mean(0)).norm()


# -- U ------------------------------------------------------------------------------------------
def queries(n: int, d: int, rank: int | None, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(2, n, d, generator=g) * torch.logspace(0.5, -1, d)
    return torch.randn(2, n, rank, generator=g) @ torch.randn(2, rank, d, generator=g)


def fit(chunks: list[torch.Tensor], rank: int = 5) -> torch.Tensor:
    return state_after(chunks, rank)[:, :-1]


def state_after(chunks: list[torch.Tensor], rank: int = 5) -> torch.Tensor:
    d = chunks[0].shape[-1]
    codec = squat_keys(d, rank=rank, g=d // 2)
    state = None
    for chunk in chunks:
        state = codec.fit(chunk, torch.zeros(2, 1, d), state)
    assert state is not None
    return state


def gram(u: torch.Tensor) -> torch.Tensor:
    """What U means: U^T U; its rows have no sign of their own."""
    return u.double().transpose(1, 2) @ u.double()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n", [3, 64, 1000])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_fit_is_the_svd(d: int, n: int, rank: int) -> None:
    """U = diag(S[:r]) Vh[:r] in float64; prompts with fewer than r queries leave rows at zero."""
    q = queries(n, d, None)
    u = fit([q], rank)
    assert u.shape == (2, rank, d)
    _, s, vh = torch.linalg.svd(q.double(), full_matrices=False)
    k = min(rank, n)
    assert torch.allclose(u.double()[:, :k].norm(dim=-1), s[:, :k], rtol=1e-4)
    assert u[:, k:].norm() < 1e-3 * s[:, 0].max()
    want = (s[:, :k, None] * vh[:, :k]).transpose(1, 2) @ (s[:, :k, None] * vh[:, :k])
    assert (gram(u) - want).norm() < 2e-3 * want.norm()


def test_chunks_give_the_same_as_one_prompt() -> None:
    """Exactly so while the queries' rank is at most r. Otherwise a chunk forgets what it cut off, and the
    merged subspace holds nearly as much of all queries' energy as the best one."""
    q = queries(300, 128, 5)
    whole, parts = gram(fit([q])), gram(fit(list(q.split([1, 2, 97, 200], dim=1))))
    assert (whole - parts).norm() < 1e-4 * whole.norm()
    q = queries(300, 128, None)

    def energy(u: torch.Tensor) -> torch.Tensor:
        basis = torch.linalg.qr(u.transpose(1, 2)).Q
        return (q @ basis).square().sum()

    best, merged = energy(fit([q])), energy(fit(list(q.split(50, dim=1))))
    assert 0.9 * best < merged <= best * 1.0001


def test_later_chunks_may_bring_stronger_directions() -> None:
    weak, strong = queries(50, 64, 5, seed=1), 100 * queries(50, 64, 5, seed=2)
    merged, alone = gram(fit([weak, strong])), gram(fit([strong]))
    assert (merged - alone).norm() < 1e-2 * alone.norm()


@pytest.mark.parametrize("value", [0.0, 1.0, 32768.0])
def test_degenerate_queries(value: float) -> None:
    state = state_after([torch.full((2, 40, 64), value)])
    assert state.isfinite().all()
    k, _ = example(64)
    codec = squat_keys(64, g=32)
    hat = codec.unpack(codec.pack(k[None], state[:1]))
    assert hat.isfinite().all()
    if value == 0:
        assert torch.equal(hat, codec.unpack(codec.pack(k[None], None)))


# -- the noise outside U --------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("chunks", [[300], [1, 2, 97, 200], [30] * 10], ids=str)
def test_no_energy_is_lost(rank: int, chunks: list[int]) -> None:
    """The queries' energy is in U or in the noise, however the prompt is chunked."""
    q = queries(300, 128, None)
    state = state_after(list(q.split(chunks, dim=1)), rank).double()
    u, noise = state[:, :-1], state[:, -1]
    assert (noise == noise[:, :1]).all()
    energy = u.square().sum((1, 2)) + (128 - rank) * noise[:, 0]
    assert torch.allclose(energy, q.double().square().sum((1, 2)), rtol=1e-5)
    if len(chunks) == 1:
        outside = torch.linalg.svdvals(q.double())[:, rank:].square().sum(-1)
        assert torch.allclose((128 - rank) * noise[:, 0], outside, rtol=1e-4)


def test_padding_makes_no_noise() -> None:
    """The directions outside U are those of the head as the model has it."""
    codec = squat_keys(80, g=48)
    q = torch.cat([queries(100, 80, None), torch.zeros(2, 100, 16)], dim=-1)
    noise = codec.fit(q, q, None)[:, -1, 0].double()
    assert torch.allclose(75 * noise, torch.linalg.svdvals(q.double())[:, 5:].square().sum(-1), rtol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 249.0, 400.0, 2500.0])
def test_the_floor_is_a_smaller_lambda(noise: float) -> None:
    k, u = example(128)
    state = state_of(u, noise)[None]
    same = squat_keys(128, g=32, lam=min(LAMBDA, 1 / max(FLOOR * noise, 1)), floor=0)
    got = squat_keys(128, g=32).pack(k[None], state)
    for name, field in same.pack(k[None], state).items():
        assert torch.equal(got[name], field)
    papers = squat_keys(128, g=32, floor=0).pack(k[None], state)
    assert torch.equal(papers["k_codes"], got["k_codes"]) == (FLOOR * noise < 1 / LAMBDA)


@pytest.mark.parametrize("d", [64, 128])
def test_no_rank_is_worse_than_kivi_under_rope(d: int) -> None:
    """Queries that the subspace has not seen. The paper's rule fails here: that is what the floor is for."""
    query, key, value = attention_data(d, tokens=1024, heads=1, rope=True)
    seen, new = query[:512], query[512:]

    def error(**options: int) -> float:
        return score_error(new, key, roundtrip("squat2", key, value, seen, **PLAIN | options)[0])

    kivi = score_error(new, key, roundtrip("kivi2", key, value)[0])
    for rank in (1, 3, 5, 8, 12, 16, 40, 63):
        assert error(r=rank) < kivi
    assert error(r=16, floor=0) > 1.03 * kivi


def test_single_channels_correct_most() -> None:
    """The paper's Eq. (3), for queries that stay in the subspace."""
    query, key, value = attention_data(64)
    seen, new = query[:128], query[128:]
    for options in (PLAIN, {}):
        hats = [roundtrip("squat2", key, value, seen, **options, g=g)[0] for g in (1, 4, 16, 32)]
        errors = [score_error(new, key, hat) for hat in hats]
        assert errors == sorted(errors)
        assert errors[0] < 0.7 * errors[-1]


def test_blocks_that_only_the_reference_knows_say_so() -> None:
    for g, served in ((1, False), (20, False), (16, True), (48, True)):
        for options in (PLAIN, {}):
            keys = FORMATS["squat2"].bind(Geometry(64, 64), {**options, "g": g}).keys
            assert (keys.reference_only is None) == served


def test_keys_before_rope_are_not_served() -> None:
    for options in (PLAIN, {}):
        keys = FORMATS["squat2"].bind(Geometry(64, 64), {**options, "rope": "before"}).keys
        assert "keys before RoPE are for vllm_kvq.roundtrip and the evaluation" in str(keys.reference_only)


def test_a_subspace_is_less_than_the_head() -> None:
    FORMATS["squat2"].bind(Geometry(64, 64), {"r": 63})
    with pytest.raises(ValueError, match="option 'r' is 64; a subspace of 64 channels is no more than 63 wide"):
        FORMATS["squat2"].bind(Geometry(64, 64), {"r": 64})


def test_a_block_of_the_whole_head_is_refused_where_it_is_padded() -> None:
    """80 channels are stored as 96: in a second block with only padding there is nothing to correct."""
    for g in (80, 96):
        with pytest.raises(ValueError, match=f"option 'g' is {g}, the whole head of 80 channels: that is KIVI"):
            squat_keys(80, g=g)
    squat_keys(80, g=64)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_corrected_key_is_finite_in_float16(sign: int) -> None:
    """Near the clamp a correction points beyond it, the further, the less the last channels count; what is read would
    otherwise not fit into float16."""
    g = torch.Generator().manual_seed(4)
    key = (sign * 32768 * torch.rand(64, 1, 64, generator=g)).half()
    query = torch.randn(64, 1, 16, generator=g) @ torch.randn(16, 64, generator=g)
    query = (100 * query * torch.logspace(1, -1, 64)).half()
    hat, _ = roundtrip("squat2", key, key, query, **PLAIN | {"r": 16}, g=16)
    assert hat.isfinite().all()

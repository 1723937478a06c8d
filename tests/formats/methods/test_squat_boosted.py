"""`squat2`: SQuat's correction in Kitty's bytes, against the paper's formula in float64 and against Kitty."""

from __future__ import annotations

import pytest
import torch

from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.formats import FORMATS, Geometry, PageFormat, roundtrip
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.methods.kitty import PARTS
from vllm_kvq.formats.methods.squat import PLAIN, BoostedSQuatKeys, SQuatKeys
from vllm_kvq.formats.parts.planes import unpack_keys
from vllm_kvq.formats.parts.quant import affine_codes, affine_parameters, fitted_parameters

LAMBDA, RANK = 1e-3, 5


def bound(head: int = 128, **options: object) -> PageFormat:
    return FORMATS["squat2"].bind(Geometry(head, 64), options)


def codec(head: int = 128, **options: object) -> BoostedSQuatKeys:
    found = bound(head, r=RANK, **options).keys
    assert isinstance(found, BoostedSQuatKeys)
    return found


def example(d: int, seed: int = 0, head: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(32, d) keys with unequal channels, zero beyond `head`, and the state of a strong subspace."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(32, d, generator=g) * (1 + 3 * torch.rand(d, generator=g)) + 2 * torch.randn(d, generator=g)
    u = torch.randn(RANK, d, generator=g) * torch.tensor([160.0, 80, 40, 20, 10])[:, None]
    if head is not None:
        k[:, head:], u[:, head:] = 0, 0
    return k, torch.cat([u, torch.zeros(1, d)])


def widest(k: torch.Tensor, count: int) -> torch.Tensor:
    """One at a time; of equal ones, the first."""
    span = (k.max(0).values - k.min(0).values).tolist()
    order = sorted(range(len(span)), key=lambda c: (-span[c], c))
    mask = torch.zeros(len(span), dtype=torch.bool)
    mask[order[:count]] = True
    return mask


def mixed(x: torch.Tensor, boosted: torch.Tensor, scales: str) -> tuple[torch.Tensor, torch.Tensor]:
    """How a (32, g) block is read, a channel at a time; and where each value lies between codes."""
    parameters = fitted_parameters if scales == "fitted" else affine_parameters
    out, place = torch.empty(x.shape, dtype=torch.float64), torch.empty(x.shape, dtype=torch.float64)
    for c in range(x.shape[1]):
        bits, column = (4 if boosted[c] else 2), x[:, c].float()
        scale, zero = parameters(column, 0, bits)
        out[:, c] = torch.addcmul(zero, affine_codes(column, scale, zero, bits), scale).double()
        place[:, c] = (x[:, c].double() - zero.double()) / scale.double()
    return out, place


def paper(k: torch.Tensor, u: torch.Tensor, boosted: torch.Tensor, g: int, scales: str) -> tuple[torch.Tensor, ...]:
    """Lemma 2 with its d x d matrices: P_inv = [[A_t, B_t^T], [B_t, C_t]]."""
    d = k.shape[1]
    k_hat, places = k.double().clone(), torch.empty(k.shape, dtype=torch.float64)
    p_inv = torch.linalg.inv(torch.eye(d, dtype=torch.float64) + LAMBDA * u.double().T @ u.double())
    for end in range(g, d + g, g):
        at = slice(end - g, min(end, d))
        new, places[:, at] = mixed(k_hat[:, at], boosted[at], scales)
        error, k_hat[:, at] = new - k_hat[:, at], new
        h = torch.linalg.inv(p_inv[:end, :end])[:, at.start - min(end, d) :]  # the block's columns of A_t^-1
        k_hat[:, end:] += error @ (p_inv[end:, :end] @ h).T
    return k_hat, places


@pytest.mark.parametrize("scales", ["range", "fitted"])
@pytest.mark.parametrize(("head", "g"), [(128, 32), (64, 16), (128, 64), (80, 32), (112, 48), (256, 64)])
@pytest.mark.parametrize("part", PARTS)
def test_codes_of_both_kinds_are_the_papers(part: str, head: int, g: int, scales: str) -> None:
    """Four blocks and other numbers of them, with 2-bit and 4-bit codes. After a value that lies on the edge of two
    codes, a token's later blocks may differ, and with them the parameters; little more than rounding moves then."""
    keys = codec(head, boost=part, g=g, key_scales=scales)
    k, state = example(keys.d, head, head=head)
    boosted = widest(k, keys.boosted)
    assert any(0 < boosted[at : at + g].sum() < g for at in range(g, keys.d, g)), "a block has both kinds"
    want, place = paper(k, state[:-1], boosted, g, scales)
    fields = keys.pack(k[None], state[None])
    assert torch.equal(fields["k_scale"][0, 0].signbit(), boosted)
    got = keys.unpack(fields)[0].double()
    near = (place - place.floor() - 0.5).abs() < 1e-2
    wrong = (got - want).abs() > 2e-3 * (1 + want.abs())
    free = torch.ones(32, dtype=torch.bool)
    for start in range(0, keys.d, g):
        at = slice(start, start + g)
        assert not (wrong[:, at] & ~near[:, at])[free].any()
        free &= ~wrong[:, at].any(1)
    assert free.float().mean() > 0.9, "ties can't be that frequent"
    plain = keys.unpack(keys.pack(k[None], None))[0].double()
    assert (plain - want)[:, g:].abs().mean() > 0.02, "so weak a correction could as well be missing"


@pytest.mark.parametrize("head", HEAD_SIZES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("scales", ["range", "fitted"])
def test_without_a_subspace_it_is_kitty(head: int, part: str, scales: str) -> None:
    """Byte for byte, both without queries and with queries that are all zero."""
    options = {"boost": part, "key_scales": scales}
    mine, kitty = bound(head, r=RANK, **options), FORMATS["kitty2"].bind(Geometry(head, 64), options)
    d = mine.geometry.d
    x = example(d, 1, head)[0].expand(2, 32, d).clone()
    x[1] *= 3
    want = kitty.keys.pack(x, None)
    assert mine.slab_region == kitty.slab_region
    for state in (None, torch.zeros(2, RANK + 1, d)):
        got = mine.keys.pack(x, state)
        assert got.keys() == want.keys()
        for name, field in want.items():
            assert torch.equal(got[name].half() if field.is_floating_point() else got[name],
                               field.half() if field.is_floating_point() else field), name  # fmt: skip


def test_values_and_page_are_kittys() -> None:
    """So that Kitty's kernels read it."""
    mine, kitty = FORMATS["squat2"].bind(Geometry(128, 64)), FORMATS["kitty2"].bind(Geometry(128, 64))
    assert (mine.slab_region, mine.page_region) == (kitty.slab_region, kitty.page_region)
    assert type(mine.values) is type(kitty.values)
    v = torch.randn(2, 64, 128)
    for name, field in kitty.values.pack(v, None).items():
        assert torch.equal(mine.values.pack(v, None)[name], field)


@pytest.mark.parametrize("seed", range(3))
def test_channels_are_chosen_before_the_correction(seed: int) -> None:
    """The narrowest channel absorbs the errors of the first block and becomes the widest: it keeps its 2 bits."""
    keys = codec(64, g=16)
    k, state = example(64, seed)
    k[:, 63] *= 0.05
    state[:-1] = 0
    state[0, :16], state[0, 63] = 1000, 200
    fields = keys.pack(k[None], state[None])
    corrected = torch.cat([x[0, 0] for x in fed(keys, k, state)], -1)
    assert widest(corrected, keys.boosted)[63]
    assert not widest(k, keys.boosted)[63]
    assert torch.equal(fields["k_scale"][0, 0].signbit(), widest(k, keys.boosted))


def fed(keys: BoostedSQuatKeys, k: torch.Tensor, state: torch.Tensor) -> list[torch.Tensor]:
    """What reaches the quantizer, block by block."""
    blocks: list[torch.Tensor] = []
    boosted = widest(k, keys.boosted)

    def keep(x: torch.Tensor, at: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks.append(x)
        few, many = (affine_parameters(x, -2, bits) for bits in (2, 4))
        scale, zero = (torch.where(boosted[at], m, f) for f, m in zip(few, many, strict=True))
        top = torch.where(boosted[at], 15.0, 3.0)
        return affine_codes(x, scale, zero, 4).minimum(top), scale, zero

    keys._correct(k[None, None], state[None], keep)
    return blocks


@pytest.mark.parametrize("head", [64, 80, 112, 128, 256])
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_scores_of_the_prompts_queries_are_better_than_kittys(head: int, rope: bool) -> None:
    query, key, value = attention_data(head, tokens=512, heads=1, rope=rope)
    seen, new = query[:256], query[256:]
    hats = [roundtrip(name, key, value, seen)[0] for name in ("squat2", "kitty2")]
    (mine, mine_new), (kitty, kitty_new) = ([score_error(q, key, hat) for q in (seen, new)] for hat in hats)
    assert mine < (0.95 if rope else 0.85) * kitty
    assert mine_new < kitty_new


def test_four_blocks_take_back_more_than_two() -> None:
    k, state = example(128, 2)
    u = state[:-1]
    errors = []
    for g in (64, 32, 16):
        keys = codec(128, g=g)
        errors.append(((keys.unpack(keys.pack(k[None], state[None]))[0] - k) @ u.T).norm().item())
    kitty = ((keys.unpack(keys.pack(k[None], None))[0] - k) @ u.T).norm().item()
    assert kitty > 1.15 * errors[0] > 1.15 * errors[1] > 1.15 * errors[2]


def test_every_unit_has_its_own_subspace() -> None:
    keys = codec(64, g=16)
    k, state = zip(*(example(64, seed) for seed in range(3)), strict=True)
    both = keys.pack(torch.cat([torch.stack(k), torch.stack(k).flip(1)], 1), torch.stack(state))
    for i in range(3):
        alone = keys.pack(k[i][None], state[i][None])
        for name, field in alone.items():
            assert torch.equal(both[name][i, 0], field[0, 0])


def test_high_digits_are_those_of_boosted_channels() -> None:
    keys = codec(128)
    k, state = example(128, 3)
    fields = keys.pack(k[None], state[None])
    high = unpack_keys(fields["k_high"], 2)
    assert high.shape[-1] == keys.boosted == 32
    assert high.float().mean() > 1, "4-bit codes are used up to their limits"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key_bits": 4, "boost": "half"}, "option 'key_bits' is 4, which keys with boosted channels can't have"),
        (
            {"token_scale": "balanced", "boost": "quarter"},
            "'token_scale' is 'balanced', which keys with boosted",
        ),
        ({"g": 128}, "that is Kitty; use kitty2 or a smaller g"),
        ({"boost": "none", "g": 128}, "that is KIVI; use kivi2 or a smaller g"),
        ({"boost": "third"}, "it takes one of"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bound(128, **options)


def test_the_way_out_of_a_refusal_works() -> None:
    for options in ({"key_bits": 4}, {"token_scale": "balanced"}):
        bound(128, boost="none", **options)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("squat2", {"key_bits": 4}, SQuatKeys),
        ("squat2", {"rope": "before"}, SQuatKeys),
        ("squat2", {"token_scale": "balanced"}, SQuatKeys),
        ("squat2", {"rope": "before", "boost": "half"}, BoostedSQuatKeys),
        ("squat4", {}, SQuatKeys),
        ("squat4", {"key_bits": 2}, BoostedSQuatKeys),
        ("kivi2", {"keys": "squat"}, BoostedSQuatKeys),
        ("kivi4", {"keys": "squat"}, SQuatKeys),
    ],
)
def test_what_is_boosted_where_nothing_is_said(name: str, options: dict[str, object], kind: type) -> None:
    assert isinstance(FORMATS[name].bind(Geometry(64, 64), options).keys, kind)


@pytest.mark.parametrize("d", [64, 128])
def test_no_rank_is_worse_than_kitty_under_rope(d: int) -> None:
    """Queries that the subspace has not seen."""
    query, key, value = attention_data(d, tokens=1024, heads=1, rope=True)
    seen, new = query[:512], query[512:]

    def error(name: str, **options: int) -> float:
        return score_error(new, key, roundtrip(name, key, value, seen, **options)[0])

    kitty = error("kitty2")
    for rank in (1, 5, 10, 20, 40, 63):
        for g in (16, d // 2):
            assert error("squat2", r=rank, g=g) < kitty


@pytest.mark.parametrize("bits", [2, 4])
def test_plain_options_give_the_papers_bytes(bits: int) -> None:
    """KIVI's record, and without queries KIVI's bytes."""
    mine = bound(64, **PLAIN, S=0, key_bits=bits, value_bits=bits)
    kivi = FORMATS[f"kivi{bits}"].bind(Geometry(64, 64), {"S": 0})
    assert mine.slab_region == kivi.slab_region
    assert mine.S == 0
    x = torch.randn(2, 64, 64)
    got, want = mine.pack(x, x, None), kivi.pack(x, x, None)
    assert all(torch.equal(got[name], field) for name, field in want.items())


def test_long_prompts_and_huge_keys_stay_finite() -> None:
    keys = codec(64, g=16)
    k, state = example(64, 4)
    k[:, :16] = 32768 * torch.sign(k[:, :16])
    state[:-1] *= 1e5
    back = keys.unpack(keys.pack(k[None], state[None]))
    assert back.isfinite().all()
    assert back.abs().max() < 65504

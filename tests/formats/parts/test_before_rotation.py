"""RoPE off and on again: what is rotated comes back, and pages know the positions of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from vllm_kvq.cli.eval import error as error_table
from vllm_kvq.eval.heads.synthetic import attention_data
from vllm_kvq.formats import Geometry, PageFormat, get_format, roundtrip
from vllm_kvq.formats.methods.lossless import RawKeys
from vllm_kvq.formats.methods.squat import PLAIN
from vllm_kvq.formats.page import FLAGS_AT, HEADER_BYTES
from vllm_kvq.formats.parts.rope import Rope

HEADS = 2


PRE = {**PLAIN, "rope": "before"}


def bound(head_size: int = 64, rope: Rope | None = None, options: Mapping[str, Any] = PRE) -> PageFormat:
    return get_format("squat2").bind(Geometry(head_size, 128, torch.float32, rope=rope), options)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [32, 64])
def test_what_was_turned_comes_back(pairing: str, rotary: int) -> None:
    """Even with a table that bfloat16 has rounded and a model has scaled, which is no longer a pure rotation."""
    exact = Rope.plain(rotary, 300, pairing=pairing)
    x, position = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(0)), torch.arange(300)
    for table in (exact.table, (1.4 * exact.table).bfloat16()):
        rope = Rope(table, pairing)
        turned = rope.apply(x, position)
        torch.testing.assert_close(rope.undo(turned, position), x)
        assert torch.equal(turned[..., rotary:], x[..., rotary:])
        assert not torch.allclose(turned[:, 1:, :rotary], x[:, 1:, :rotary])
    # scores depend only on distances
    early, late = (exact.apply(x[:, :250], position[:250] + shift) for shift in (0, 50))
    torch.testing.assert_close(early @ early.mT, late @ late.mT, rtol=1e-3, atol=1e-3)


def test_no_position_is_read_outside_of_the_table() -> None:
    rope = Rope.plain(64, 8)
    x = torch.randn(2, 64)
    for far, near in ((100, 7), (-1, 0)):
        assert torch.equal(rope.apply(x, torch.tensor(far)), rope.apply(x, torch.tensor(near)))


def test_what_is_no_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="pairing 'thirds' is not one of 'half', 'interleaved'"):
        Rope(torch.ones(4, 64), "thirds")
    with pytest.raises(ValueError, match=r"table \(4, 63\) is not \(positions, an even number of channels\)"):
        Rope(torch.ones(4, 63))
    with pytest.raises(ValueError, match="RoPE of 96 channels does not fit head size 64"):
        bound(rope=Rope.plain(96, 4))


@pytest.mark.parametrize("head_size", [64, 80])
def test_pages_know_their_positions(head_size: int) -> None:
    """Units of two pages, written in any order, one page somewhere else in the pool, are read as if packed by hand."""
    rope, d = Rope.plain(head_size, 1024), head_size
    fmt = bound(head_size, rope)
    key = torch.randn(HEADS, 256, d, generator=torch.Generator().manual_seed(1))
    state = fmt.keys.fit(*[fmt.before_rope(fmt.widen(key)[0], torch.arange(256))] * 2, None)
    pool = torch.zeros(9, HEADS, fmt.record_bytes, dtype=torch.uint8)
    where, first = {0: 7, 1: 3}, 512  # the request's pages 4 and 5
    for unit in (5, 0, 7, 1, 2, 6, 3, 4):
        k = fmt.widen(key[:, 32 * unit : 32 * unit + 32])[0]
        fields = fmt.pack(k, k, state, position=torch.full((HEADS,), first + 32 * unit))
        fmt.write(pool, torch.tensor([where[unit // 4]]), torch.tensor([unit % 4]), fields)
    heads = pool[:, :, 4:8].contiguous().view(torch.int32)[..., 0]
    assert heads[[7, 3]].tolist() == [[512] * HEADS, [640] * HEADS]
    assert not pool[..., 8:FLAGS_AT].any()
    got, _ = fmt.unpack(fmt.read(pool, torch.tensor([7, 3])))
    got = got.unflatten(0, (2, HEADS)).transpose(0, 1).flatten(1, 2)
    plain = get_format("squat2").bind(Geometry(head_size, 128, torch.float32), PLAIN)
    position = first + torch.arange(256)
    before = rope.undo(fmt.widen(key)[0], position).unflatten(1, (-1, 32)).flatten(0, 1)
    kept = plain.keys.unpack(plain.keys.pack(before, state.repeat_interleave(8, 0))).unflatten(0, (HEADS, -1))
    assert torch.equal(got, rope.apply(kept.flatten(1, 2), position))
    moved = pool[[0, 3, 7]]
    again, _ = fmt.unpack(fmt.read(moved, torch.tensor([2, 1])))
    assert torch.equal(again.unflatten(0, (2, HEADS)).transpose(0, 1).flatten(1, 2), got)


def test_positions_must_be_told() -> None:
    k = torch.zeros(1, 32, 64)
    with pytest.raises(ValueError, match="squat2 stores keys by their positions, and needs to know them"):
        bound(rope=Rope.plain(64, 64)).pack(k, k, None)


def test_servers_never_get_such_a_codec() -> None:
    with pytest.raises(TypeError, match="Mine declares before_rope, which no server supports; declare reference_only"):
        type("Mine", (RawKeys,), {"before_rope": True})


def test_other_formats_keep_their_bytes() -> None:
    """Their keys are not touched, whatever the model's RoPE is, and their headers have no position."""
    k = torch.randn(HEADS, 32, 64, generator=torch.Generator().manual_seed(2))
    pools = []
    for rope in (None, Rope.plain(64, 1024)):
        fmt = bound(rope=rope, options={})
        pool = torch.zeros(2, HEADS, fmt.record_bytes, dtype=torch.uint8)
        fields = fmt.pack(k, k, None, position=torch.full((HEADS,), 96))
        fmt.write(pool, torch.tensor([1]), torch.tensor([3]), fields)
        pools.append(pool)
    assert torch.equal(*pools)
    assert not pools[0][..., 4:FLAGS_AT].any()
    assert pools[0][1, :, FLAGS_AT:HEADER_BYTES].any()


@pytest.mark.parametrize("d", [64, 128])
def test_it_is_better_where_rope_hides_what_keys_share(d: int) -> None:
    """And the same where there was no RoPE."""
    after, before = (error_table.error("squat2", options, d, rope=True) for options in (PLAIN, PRE))
    assert before < 0.95 * after
    data = attention_data(d)[1:] + attention_data(d)[:1]
    want, got = (roundtrip("squat2", *data, **options) for options in (PLAIN, PRE))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

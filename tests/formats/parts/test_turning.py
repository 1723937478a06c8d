"""Means of keys that RoPE turns, slab by slab (formats/parts/turning.py)."""

from __future__ import annotations

import pytest
import torch

from vllm_kvq.formats.parts.rope import PAIRINGS, Rope
from vllm_kvq.formats.parts.turning import COARSE, FINE, MIDDLE, SLABS, Turning

FAR = torch.tensor([0, 1, FINE - 1, FINE, 1000, 4095, SLABS - 1])


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary", [64, 80, 32])
def test_a_mean_is_turned_as_rope_turns_keys(pairing: str, rotary: int) -> None:
    d = 80
    rope = Rope.plain(rotary, 4096, 10_000.0, pairing)
    turning = Turning.of(rope, d)
    b = torch.randn(2, d, generator=torch.Generator().manual_seed(0))
    slab = torch.tensor([0, 3, 100])
    mean = turning.phases(slab) @ turning.matrix(b).mT
    angle = (32 * slab[:, None] + MIDDLE) * turning.theta[: rotary // 2]
    middles = Rope(torch.cat([angle.cos(), angle.sin()], 1).float(), pairing)
    want = middles.apply(b[:, None].expand(-1, 3, -1), torch.arange(3))
    assert torch.allclose(mean, want, rtol=1e-5, atol=1e-5)
    # token by token, a slow channel is what RoPE makes of it, and one without RoPE is as it was
    tokens = rope.apply(b[:, None].expand(-1, 3, -1), 32 * slab + 15)
    slow = turning.theta < 1e-3
    for channel in torch.cat([turning.first[slow], turning.second[slow]]):
        assert torch.allclose(mean[..., channel], tokens[..., channel], atol=2e-3)


def test_the_tables_make_every_slab() -> None:
    turning = Turning.of(Rope.plain(64, 8192, 1e6), 64)
    fine, coarse = turning.tables()
    assert fine.shape == (FINE, 64)
    assert coarse.shape == (COARSE, 64)
    (c, s), (x, y) = fine[FAR % FINE].chunk(2, 1), coarse[FAR // FINE].chunk(2, 1)
    assert torch.allclose(torch.cat([c * x - s * y, s * x + c * y], 1), turning.phases(FAR), atol=1e-5)
    assert torch.equal(turning.phases(FAR + SLABS), turning.phases(FAR))


def test_angles_are_exact_while_the_default_dtype_is_a_models() -> None:
    """As it is in vLLM while layers are made."""
    turning = Turning.of(Rope.plain(64, 8192, 1e6), 64)
    want = turning.phases(FAR), *turning.tables()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = turning.phases(FAR), *turning.tables()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_angles_are_found_in_rounded_tables(dtype: torch.dtype, scale: float) -> None:
    """vLLM's have the model's dtype; YaRN's are scaled."""
    theta = 1e6 ** (-torch.arange(32) / 32)
    rope = Rope.plain(64, 32768, 1e6)
    found = Turning.of(Rope((scale * rope.table).to(dtype)), 64).theta
    # of a turn, after 100,000 tokens
    assert ((found - theta) * 100_000).abs().max() < 0.05


def test_a_table_that_is_no_turning_is_none() -> None:
    rope = Rope.plain(64, 4096)
    bent = rope.table.clone()
    bent[2048:] = rope.table[:2048]
    for unknown in (None, Rope(bent)):
        assert not Turning.of(unknown, 64).theta.any()


def test_the_mean_is_found_in_turned_keys() -> None:
    turning = Turning.of(Rope.plain(64, 4096, 100.0), 96)
    b = torch.randn(3, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    e = turning.phases(torch.arange(100)).double()
    key = e @ turning.matrix(b).mT
    assert torch.allclose(turning.mean(key.mT @ e / 100), b, atol=1e-6)


def test_rows_are_kept() -> None:
    """As float32, with the channels that pad a head."""
    turning = Turning.of(Rope.plain(40, 4096, pairing="interleaved"), 80)
    again = Turning.of_rows(*(x.float() for x in turning.rows(96)))
    assert torch.equal(again.theta[:40].float(), turning.theta.float())
    assert not again.theta[40:].any()
    assert torch.equal(again.first[:40], turning.first)
    assert torch.equal(torch.cat([again.first, again.second]).sort().values, torch.arange(96))

"""Scales of tokens in one byte."""

from __future__ import annotations

import torch

from vllm_kvq.formats.parts.quant import half
from vllm_kvq.formats.parts.scales import LARGEST, around, scale_of

EVERY = scale_of(torch.arange(1, LARGEST + 1).to(torch.uint8))


def test_a_byte_is_one_of_eight_steps_to_the_next_power_of_two() -> None:
    normal = [(1 + m / 8) * 2.0**e for e in range(-14, 16) for m in range(8)]
    assert EVERY.tolist() == [m / 8 * 2.0**-14 for m in range(1, 8)] + normal


def test_four_around_a_number() -> None:
    x = half(torch.logspace(-4, 4, 999))
    found = torch.stack(around(x)).int()
    assert torch.equal(found.diff(dim=0), torch.ones(3, 999, dtype=torch.int32))
    below, above = EVERY[found[1].long() - 1], EVERY[found[2].long() - 1]
    assert (below <= x).all()
    assert (x < above).all()


def test_ends() -> None:
    """The largest is finite, and the least is not zero."""
    found = torch.stack(around(torch.tensor([-1.0, -0.0, 0.0, 1e-30, 65504.0, 1e30])))
    assert found.T.tolist() == [[1, 2, 3, 4]] * 4 + [[LARGEST - 3, LARGEST - 2, LARGEST - 1, LARGEST]] * 2
    assert EVERY.isfinite().all()

"""`python -m proof transforms`: each row changes what it says, and only for its own measurement."""

from __future__ import annotations

import pytest
import torch

from proof.tables.transformed.scales import in_eight_bits, not_fitted
from proof.tables.transformed.transforms import ROWS, Row, alike, documentation, first, in_sixteens
from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.formats.methods import klt
from vllm_kvq.formats.parts.search import levels, searched, widths

VARIANCE = torch.logspace(0, -4, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))].tolist()


def test_allocations_use_every_slot() -> None:
    for slots in (64, 80, 96, 128):
        for allocate in (in_sixteens, alike, klt.allocated):
            assert sum(allocate(VARIANCE, slots)) == slots
    digits = in_sixteens(VARIANCE, 80)
    order = sorted(range(64), key=lambda c: VARIANCE[c])
    for i in range(0, 64, 16):
        assert len({digits[c] for c in order[i : i + 16]}) == 1
    assert set(alike(VARIANCE, 80)) == {1, 2}


def test_a_row_changes_the_codec_while_it_is_measured() -> None:
    row = next(row for row in ROWS if row.changed.get("allocated") is in_sixteens)
    before = klt.allocated
    with row.planted():
        assert klt.allocated is in_sixteens
        assert in_sixteens(VARIANCE, 80) != before(VARIANCE, 80)
    assert klt.allocated is before
    with Row("nothing").planted():
        assert klt.allocated is before


def test_every_row_is_a_format() -> None:
    assert len({row.about for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.choice.label.startswith(row.name)
        assert all(hasattr(klt, name) for name in row.changed)


@pytest.mark.parametrize(("calibrate", "wanted"), [(first(1), [0]), (first(3), [0, 1, 2]), (documentation, [0, 3, 6])])
def test_fitted_to_some_of_the_texts(calibrate: object, wanted: list[int]) -> None:
    texts = []
    for n in range(9):
        x = torch.full((2 + n, 2, 64), float(n))
        texts.append(Captured((Layer(0, x, x[:, :1], x[:, :1], 1.0),), (), None, None, None))
    assert callable(calibrate)
    assert [float(text.layers[0].key[0, 0, 0]) for text in calibrate(texts)] == wanted


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_other_scales(bits: int) -> None:
    """No token has less error with a factor's own scale than with the one that fits; 8 bits are in between."""
    generator = torch.Generator().manual_seed(bits)
    y = torch.randn(256, 2, 64, generator=generator) * torch.rand(256, 2, 1, generator=generator)
    y[..., 5] *= 5
    weight = torch.rand(64, generator=generator) + 0.1
    step, most = widths(torch.full((64,), bits))

    def error(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((levels(codes, step, most) * scale - y).square() * weight).sum(-1)

    found, before = (error(*how(y, step, most, weight)) for how in (searched, not_fitted))
    assert (found <= before).all()
    assert found.sum() < 0.998 * before.sum()
    codes, scale = in_eight_bits(y, step, most, weight)
    assert (scale.half().view(torch.int16) & 0x7F == 0).all()
    assert found.sum() < error(codes, scale).sum() < before.sum()

"""`python -m proof transforms`: each row changes what it says, and only for its own measurement."""

from __future__ import annotations

import pytest
import torch

from proof.tables.transformed.scales import FLOAT16
from proof.tables.transformed.transforms import ROWS, Row, alike, documentation, first, in_sixteens
from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.methods import klt
from vllm_kvq.formats.parts.scales import scale_of
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
def test_scales_of_two_bytes(bits: int) -> None:
    """They are hardly better than those of one byte, of which the best one around is taken."""
    generator = torch.Generator().manual_seed(bits)
    y = torch.randn(256, 2, 64, generator=generator) * torch.rand(256, 2, 1, generator=generator)
    y[..., 5] *= 5
    weight = torch.rand(64, generator=generator) + 0.1
    step, most = widths(torch.full((64,), bits))

    def error(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((levels(codes, step, most) * scale - y).square() * weight).sum()

    codes, byte = searched(y, step, most, weight)
    of_one = error(codes, scale_of(byte))
    assert 0.98 * of_one < error(*FLOAT16["searched"](y, step, most, weight)) < 1.05 * of_one


def test_scales_of_two_bytes_are_stored() -> None:
    row = next(row for row in ROWS if row.about == "klt2, scales of two bytes")
    x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0))
    with row.planted():
        page = get_format("klt2").bind(Geometry(64, 64))
        stored = {f.name: f.dtype for f in page.slab_region.fields if "scale" in f.name}
        fields = page.values.pack(x, None)
        read = page.values.unpack(fields)
    assert stored == {"k_scale": torch.float16, "v_scale": torch.float16}
    assert fields["v_scale"].dtype == torch.float32
    assert (read - x).norm() < 0.4 * x.norm()

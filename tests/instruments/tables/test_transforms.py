"""`python -m proof transforms`: each row changes what it says, and only for its own measurement."""

from __future__ import annotations

import pytest
import torch

from proof.tables.transformed import values
from proof.tables.transformed.fitted import SINKS, fitted, own_means
from proof.tables.transformed.scales import FLOAT16
from proof.tables.transformed.transforms import ROWS, Row, alike, documentation, first, in_sixteens
from proof.tables.transformed.values import CentredValues, TransformedValues
from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.codec import ValueCodec
from vllm_kvq.formats.constants import Constants
from vllm_kvq.formats.methods import klt
from vllm_kvq.formats.parts.scales import scale_of
from vllm_kvq.formats.parts.search import levels, searched, widths
from vllm_kvq.formats.parts.turning import Turning

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


def text_of(value: torch.Tensor) -> Layer:
    return Layer(0, value, value, value, 1.0)


def error(codec: type[ValueCodec], calibration: torch.Tensor, x: torch.Tensor) -> float:
    """Relative, of values (tokens, heads, d) with two bits, in two blocks of tokens."""
    constants = Constants(None, values.fitted([text_of(part) for part in calibration.chunk(2)]))
    page = codec(Geometry(64, 64, constants=constants), {"searched_bits": 2})
    blocks = x.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1)
    return float((page.unpack(page.pack(blocks, None)) - blocks).norm() / blocks.norm())


def test_values_less_their_mean() -> None:
    """Heads have means of their own, which take an error away that rotating leaves."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 3, 64, generator=generator)
    mean = torch.randn(1, 3, 64, generator=generator).exp()
    plain, less = (error(codec, (x + mean)[:896], (x + mean)[896:]) for codec in (klt.SearchedValues, CentredValues))
    assert less < 0.6 * plain
    plain, less = (error(codec, x[:896], x[896:]) for codec in (klt.SearchedValues, CentredValues))
    assert less == pytest.approx(plain, rel=0.02)


def test_values_by_a_transform() -> None:
    """It gains where few directions, each head's own, have most of the variance; elsewhere nothing is lost."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 3, 64, generator=generator)
    turned = torch.linalg.qr(torch.randn(3, 64, 64, generator=generator))[0]
    uneven = torch.einsum("thd,hde->the", x * torch.logspace(0, -2, 64), turned)
    plain, own = (error(codec, uneven[:1920], uneven[1920:]) for codec in (klt.SearchedValues, TransformedValues))
    assert own < 0.36 * plain
    plain, own = (error(codec, x[:1920], x[1920:]) for codec in (klt.SearchedValues, TransformedValues))
    assert own == pytest.approx(plain, rel=0.03)


def test_a_row_has_values_of_its_own_while_it_is_measured() -> None:
    rows = [row for row in ROWS if row.values is not None]
    assert {row.name for row in rows} == {"klt2", "klt3", "klt4"}
    for row in rows:
        with row.planted():
            assert get_format(row.name).values is row.values
            assert get_format(row.name).settings(row.choice.options).get("searched_bits") == int(row.name[-1])
        assert get_format(row.name).values is klt.SearchedValues


def test_means_of_the_text_itself() -> None:
    """Another text's constants, but for the mean of keys; sinks, which are not packed, have no part in it."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randn(128, 2, 64, generator=generator) + offset for offset in (0.0, 3.0)]
    texts[1][:SINKS] = 1e3
    other, this = (Captured((text_of(x),), (), None, None, None) for x in texts)
    before = {0: Constants(fitted([other])[0], None)}
    after = own_means(before, this)[0].keys
    keys = before[0].keys
    assert keys is not None
    assert after is not None
    assert (after[:, 0] - texts[1][SINKS:].mean(0)).abs().max() < 1e-4
    assert after[:, 1:].equal(keys[:, 1:])
    assert not Turning.of_rows(*keys[0, 2:4]).theta.any()

"""Regions: where the bytes of named fields lie."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvq.formats.parts.fields import Field, Region, round_up

DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32]
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
FIELDS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=0, max_size=6).map(
    lambda fs: tuple(Field(f"f{i}", dtype, shape) for i, (dtype, shape) in enumerate(fs))
)


def random_bits(field: Field, lead: tuple[int, ...], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*lead, field.nbytes), generator=g, dtype=torch.uint8)
    return raw.view(field.dtype).reshape(*lead, *field.shape)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


@given(FIELDS)
def test_fields_are_aligned_and_disjoint(fields: tuple[Field, ...]) -> None:
    """No line is read for a field that it does not hold, but of two short fields in one line, for both."""
    region = Region.of(fields)
    taken = torch.zeros(region.nbytes, dtype=torch.int8)
    lines = 0.0
    for field, offset in zip(fields, region.offsets, strict=True):
        short = field.nbytes <= 32
        assert offset % (32 if short else 64) == 0
        assert region.offset(field.name) == offset
        taken[offset : offset + field.nbytes] += 1
        lines += 0.5 if short else round_up(field.nbytes, 64) / 64
    assert (taken <= 1).all()
    assert region.nbytes == 64 * math.ceil(lines)


def test_two_short_fields_share_a_line() -> None:
    sizes = {"a": 32, "b": 100, "c": 20, "d": 33, "e": 1, "f": 32, "g": 64}
    region = Region.of(tuple(Field(name, torch.uint8, (size,)) for name, size in sizes.items()))
    found = dict(zip(sizes, region.offsets, strict=True))
    assert found == {"a": 0, "b": 64, "c": 32, "d": 192, "e": 256, "f": 288, "g": 320}
    assert region.nbytes == 384


@given(FIELDS, st.integers(0, 1000))
def test_read_inverts_write_bit_for_bit(fields: tuple[Field, ...], seed: int) -> None:
    """Any bit pattern survives, NaN payloads too; bytes between the fields are not written."""
    region = Region.of(fields)
    values = {f.name: random_bits(f, (2, 3), seed + i) for i, f in enumerate(fields)}
    out = torch.full((2, 3, region.nbytes), 0xA5, dtype=torch.uint8)
    region.write(out, values)
    back = region.read(out)
    free = torch.ones(region.nbytes, dtype=torch.bool)
    for field, offset in zip(fields, region.offsets, strict=True):
        assert torch.equal(bits_of(back[field.name]), bits_of(values[field.name]))
        free[offset : offset + field.nbytes] = False
        # the bytes themselves: row-major, little endian
        assert torch.equal(bits_of(out[..., offset : offset + field.nbytes]), bits_of(values[field.name]))
    assert (out[..., free] == 0xA5).all()


def test_strided_values_and_views_are_written() -> None:
    field = Field("x", torch.float16, (4, 32))
    x = torch.randn(2, 32, 4)
    out = torch.zeros(2, 512, dtype=torch.uint8)[:, 128:384]
    Region.of((field,)).write(out, {"x": x.transpose(1, 2)})
    assert torch.equal(Region.of((field,)).read(out)["x"], x.transpose(1, 2).half())


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicate"):
        Region.of((Field("x", torch.uint8, (1,)), Field("x", torch.uint8, (2,))))

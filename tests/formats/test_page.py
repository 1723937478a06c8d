"""Records: their exact sizes, the places in them, and that writers touch only their own bytes."""

import itertools
from collections.abc import Callable

import pytest
import torch

from vllm_kvq.formats import FORMATS, Geometry, PageFormat
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.page import MAGIC
from vllm_kvq.formats.parts.fields import Field, round_up

HEADS = 2

# (format, d): bytes of a slab and of the page fields, added up by hand: keys + values
SIZES = {
    # k_scale, k_zero 2 d each, k_codes 8 d; v_codes 8 d, v_scale, v_zero 64 bytes per 32 channels each
    ("kivi2", 64): (128 + 128 + 512 + 512 + 128 + 128, 0),
    ("kivi2", 128): (3072, 0),
    ("kivi2", 256): (512 + 512 + 2048 + 2048 + 512 + 512, 0),
    ("squat4", 64): (128 + 128 + 1024 + 1024 + 128 + 128, 0),
    ("squat4", 128): (256 + 256 + 2048 + 2048 + 256 + 256, 0),
    ("squat4", 256): (10240, 0),
    # k_bits 4 m = 8 d, k_norm 64, ko_bits 4 d, ko_norm 64, ko_index 64 (4, 8, 16 used); values as kivi2
    ("qjl3", 64): (512 + 64 + 256 + 64 + 64 + 768, 0),
    ("qjl3", 128): (1024 + 64 + 512 + 64 + 64 + 1536, 0),
    ("qjl3", 256): (2048 + 64 + 1024 + 64 + 64 + 3072, 0),
    # 16 d for 8 bits per pair; v_codes 16 d, 64 + 64 per 128 channels; four float16 per pair and page
    ("polar4", 64): (1024 + 1024 + 64 + 64, 256),
    ("polar4", 128): (2048 + 2048 + 64 + 64, 512),
    ("polar4", 256): (4096 + 4096 + 128 + 128, 1024),
    # keys as polar4; values 64 d; one float16 per pair and page
    ("polar4_v16", 64): (1024 + 4096, 64),
    ("polar4_v16", 128): (2048 + 8192, 128),
    # 12 d for 6 bits per pair; values as kivi2
    ("polar3", 64): (512 + 256 + 768, 256),
    ("polar3", 128): (1024 + 512 + 1536, 512),
    ("polar3", 256): (2048 + 1024 + 3072, 1024),
    # per half: codes 8 d, scale 2 d, slot 4 d; one float16 norm per channel and page
    ("innerq2", 64): (2 * (512 + 128 + 256), 128),
    ("innerq2", 128): (2 * (1024 + 256 + 512), 256),
    ("innerq2", 256): (2 * (2048 + 512 + 1024), 512),
    # codes 8 d, high digits 8 per boosted channel, scale and zero 2 d each; values 8 d, and 64 + 64 per head
    ("kitty2", 64): (512 + 128 + 256 + 512 + 128, 0),
    ("kitty2", 128): (1024 + 256 + 512 + 1024 + 128, 0),
    ("squat2", 64): (512 + 128 + 256 + 512 + 128, 0),
    ("squat2", 128): (1024 + 256 + 512 + 1024 + 128, 0),
    ("squat2", 256): (2048 + 512 + 1024 + 2048 + 128, 0),
    ("kivi4", 128): (5120, 0),
    ("lossless", 128): (2 * 32 * 128 * 2, 0),
}
# (format, d, N): bytes of a record, literally
RECORDS = {
    ("kivi2", 64, 64): 3200, ("kivi2", 64, 128): 6272, ("kivi2", 128, 64): 6272,
    ("kivi2", 128, 128): 12416, ("squat2", 64, 64): 3200, ("squat2", 128, 64): 6016, ("squat2", 128, 128): 11904,
    ("squat4", 128, 64): 10368, ("qjl3", 64, 64): 3584, ("qjl3", 128, 64): 6656, ("qjl3", 128, 128): 13184,
    ("polar4", 128, 64): 9088, ("polar4", 128, 128): 17536, ("polar3", 64, 64): 3456,
    ("polar3", 128, 64): 6784,
    ("innerq2", 64, 64): 3840, ("innerq2", 128, 64): 7552, ("innerq2", 128, 128): 14720,
}  # fmt: skip


PACKED = [name for name, fmt in FORMATS.items() if not fmt.keys.calibrated]
"""Formats except those that take constants of a model, one KV head at a time (peers/test_peer_vectors.py)."""


def bind(name: str, d: int = 128, n: int = 128, **options: object) -> PageFormat:
    """Formats that ship with more sinks than a small page holds have as many as the page holds."""
    return FORMATS[name].bind(Geometry(d, n), {"S": min(n, FORMATS[name].settings().S)} | options)


@pytest.mark.parametrize(("name", "d"), SIZES)
@pytest.mark.parametrize("n", [32, 64, 128])
def test_record_sizes(name: str, d: int, n: int) -> None:
    fmt, (slab, page) = bind(name, d, n), SIZES[name, d]
    assert fmt.slab_region.nbytes == slab
    assert fmt.page_region.nbytes == page
    record = -(-(64 + page + n // 32 * slab) // 128) * 128
    assert fmt.record_bytes == record
    assert fmt.bits_per_element == record * 8 / (2 * n * d)
    assert FORMATS[name].bits_per_element(d, n) == record * 8 / (2 * n * d)
    assert FORMATS[name].capacity_factor(d, n) == 16 * 2 * n * d / (record * 8)


@pytest.mark.parametrize(("name", "d", "n"), RECORDS)
def test_record_literals(name: str, d: int, n: int) -> None:
    assert bind(name, d, n).record_bytes == RECORDS[name, d, n]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("n", [32, 64, 96, 128, 512])
def test_alignment(name: str, n: int) -> None:
    for d in HEAD_SIZES:
        if d > 256 and name == "qjl3":
            with pytest.raises(ValueError, match="at most 256 channels, not 512; set the kvq option 'outliers' to 0"):
                bind(name, d, n)
            continue
        fmt = bind(name, d, n)
        assert fmt.record_bytes % 128 == 0
        assert fmt.slabs_at % 64 == 0
        assert fmt.slab_region.nbytes % 64 == 0
        assert fmt.unit in (32, n)
        assert fmt.W % fmt.unit == 0
        assert fmt.W >= fmt.settings.W


@pytest.mark.parametrize("name", PACKED)
def test_odd_heads_pay_for_their_padding(name: str) -> None:
    for head, stored in ((80, 96), (112, 128)):
        assert bind(name, head, 64).record_bytes == bind(name, stored, 64).record_bytes
        ratio = bind(name, head, 64).bits_per_element / bind(name, stored, 64).bits_per_element
        assert ratio == pytest.approx(stored / head, rel=1e-12)


def test_key_bits_without_alignment() -> None:
    """The figures of the papers: only codes and parameters, d = 128."""
    assert bind("kivi2").half_bits_per_element("keys") == 3.0
    assert bind("squat2").half_bits_per_element("keys") == bind("kitty2").half_bits_per_element("keys") == 3.5
    assert bind("qjl3").half_bits_per_element("keys") == (1024 + 64 + 512 + 64 + 8) * 8 / (32 * 128)
    assert bind("polar3", n=64).half_bits_per_element("keys") == 3.5
    assert bind("polar3", mode="paper").half_bits_per_element("keys") == 3.0625
    assert bind("polar4", n=128).half_bits_per_element("keys") == 4.25
    # the paper's: groups of 64 tokens have a step per pair, 16 / 2 / 64 bits
    assert bind("polar4_v16", n=64).half_bits_per_element("keys") == 4 + 0.125
    assert bind("polar3", n=64, mode="paper", values="raw").half_bits_per_element("keys") == 3 + 0.125
    # three-bit angles: 5 bits per pair; at d = 96 the third bits of 48 pairs take 64
    assert bind("polar3", n=64, mode="paper", angle_bits=3).half_bits_per_element("keys") == 2.5 + 0.125
    padded = bind("polar3", d=96, n=64, mode="paper", angle_bits=3).half_bits_per_element("keys")
    assert padded == pytest.approx(2.5 + 0.125 + 16 / 96)
    # m sign bits and a norm, and nothing for outliers, because there are none
    assert bind("qjl3", n=64, outliers=0).half_bits_per_element("keys") == 2 + 16 / 128
    assert bind("qjl3", n=64, outliers=0, m=384).slab_region.nbytes == 1536 + 64 + 1536
    assert bind("innerq2").half_bits_per_element("keys") == 3.5 + 16 / 128
    assert bind("innerq2").half_bits_per_element("values") == 3.5
    assert bind("polar4").half_bits_per_element("values") == 4.25


@pytest.mark.parametrize(("d", "n"), [(128, 1568), (128, 2048)])
def test_too_large_pages_are_refused(d: int, n: int) -> None:
    with pytest.raises(ValueError, match="the largest is 1024"):
        bind("squat2", d, n)


def test_sinks_must_fit_in_a_page() -> None:
    with pytest.raises(ValueError, match="'S' is 64"):
        bind("innerq2", n=32, S=64)


def test_the_window_of_keys_is_no_longer_than_that_of_values() -> None:
    assert (bind("squat2").W_keys, bind("squat2", W_keys=0).W_keys) == (32, 0)
    assert (bind("polar4", W=128, W_keys=32).W, bind("polar4", W=128, W_keys=32).W_keys) == (128, 128)
    with pytest.raises(ValueError, match="option 'W_keys' is 64, more than 'W', 32, the window of the values"):
        bind("squat2", W_keys=64)


def garbage(fmt: PageFormat, pages: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (pages, HEADS, fmt.record_bytes), generator=g, dtype=torch.uint8)


def units(fmt: PageFormat, n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Fields of n pack units, of random data that differs between units and heads."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(n * HEADS, fmt.unit, fmt.geometry.d, generator=g) for _ in range(2))
    state = torch.rand(HEADS, fmt.state_rows, fmt.geometry.d, generator=g).repeat(n, 1, 1) if fmt.state_rows else None
    fields = fmt.pack(k, v, state)
    # `lossless` leaves the rounding to the model's dtype to the store
    return {f.name: fields[f.name].to(f.dtype) for f in fmt.page_region.fields + fmt.slab_region.fields}


@pytest.mark.parametrize("name", [n for n in PACKED if n != "lossless"])
def test_pack_returns_what_will_be_read_back(name: str) -> None:
    """The store no longer rounds any parameter: codes were chosen against the stored ones."""
    fmt = bind(name, 64, 64)
    g = torch.Generator().manual_seed(5)
    k, v = (torch.randn(2, fmt.unit, 64, generator=g) * 3 for _ in range(2))
    fields = fmt.pack(k, v, torch.rand(2, fmt.state_rows, 64, generator=g) if fmt.state_rows else None)
    assert set(fields) == {f.name for f in fmt.page_region.fields + fmt.slab_region.fields}
    for f in fmt.page_region.fields + fmt.slab_region.fields:
        x = fields[f.name]
        assert torch.equal(x.to(f.dtype).to(x.dtype), x), f.name
        per_unit = fmt.unit // 32 if f in fmt.slab_region.fields else 1
        assert x.numel() * f.dtype.itemsize == 2 * per_unit * f.nbytes, f.name


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("d", [64, 80])
def test_units_in_any_order(name: str, d: int) -> None:
    """Units of several pages written one by one, shuffled and in batches, are read back at the right places."""
    fmt = bind(name, d, 128)
    places = list(itertools.product((4, 1, 3), range(fmt.N // fmt.unit)))
    fields = units(fmt, len(places))
    pages = torch.zeros(6, HEADS, fmt.record_bytes, dtype=torch.uint8)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(3))
    for batch in order.split(2):
        page, unit = (torch.tensor([places[i][j] for i in batch]) for j in (0, 1))
        rows = (batch[:, None] * HEADS + torch.arange(HEADS)).flatten()
        fmt.write(pages, page, unit, {k: v[rows] for k, v in fields.items()})
    got = fmt.read(pages, torch.tensor([4, 1, 3]))
    key, value = fmt.unpack(got)
    assert key.shape == value.shape == (3 * HEADS, fmt.N, fmt.geometry.d)
    # (page, unit, head) -> (page, head, unit)
    want = [x.unflatten(0, (3, -1, HEADS)).transpose(1, 2).reshape(key.shape) for x in fmt.unpack(fields)]
    assert torch.equal(key, want[0])
    assert torch.equal(value, want[1])
    assert fmt.packed_slabs(pages, torch.tensor([4, 1, 3])).all()
    assert not pages[[0, 2, 5]].any(), "another page was written"


@pytest.mark.parametrize("name", [n for n in PACKED if bind(n, 64, 128).unit == 32])
def test_partial_pages(name: str) -> None:
    """A page of which two slabs are packed: flags say so, and the bytes of the other slabs stay as they
    were."""
    fmt = bind(name, 64, 128)
    pages = torch.zeros(2, HEADS, fmt.record_bytes, dtype=torch.uint8)
    fields = units(fmt, 2)
    assert not fmt.packed_slabs(pages, torch.tensor([0, 1])).any()
    fmt.write(pages, torch.tensor([1, 1]), torch.tensor([3, 1]), fields)
    assert fmt.packed_slabs(pages, torch.tensor([0, 1])).tolist() == [[False] * 4, [False, True, False, True]]
    size = fmt.slab_region.nbytes
    for slab in (0, 2):
        start = fmt.slabs_at + slab * size
        assert not pages[1, :, start : start + size].any()
    key, _ = fmt.unpack(fmt.read(pages, torch.tensor([1])))
    want, _ = fmt.unpack(fields)
    assert torch.equal(key[:, 96:128], want[:HEADS])
    assert torch.equal(key[:, 32:64], want[HEADS:])


@pytest.mark.parametrize("head", [0, MAGIC - 1, MAGIC ^ (1 << 31)])
def test_what_is_no_page_is_not_packed(head: int) -> None:
    """Flags are not enough: blocks hold whatever vLLM kept in them before."""
    fmt = bind("squat2", 64, 128)
    pages = torch.zeros(1, HEADS, fmt.record_bytes, dtype=torch.uint8)
    fmt.write(pages, torch.tensor([0]), torch.tensor([2]), units(fmt, 1))
    assert fmt.packed_slabs(pages, torch.tensor([0])).tolist() == [[False, False, True, False]]
    pages[:, :, :4] = torch.tensor([head & 0xFFFFFFFF]).view(torch.uint8)[:4]
    assert not fmt.packed_slabs(pages, torch.tensor([0])).any()


def test_page_wide_formats_are_packed_whole() -> None:
    fmt = bind("polar4", 64, 128)
    assert fmt.unit == 128
    pages = torch.zeros(1, HEADS, fmt.record_bytes, dtype=torch.uint8)
    fmt.write(pages, torch.tensor([0]), torch.tensor([0]), units(fmt, 1))
    assert fmt.packed_slabs(pages, torch.tensor([0])).tolist() == [[True] * 4]


@pytest.mark.parametrize("name", PACKED)
def test_only_own_bytes_are_written(name: str) -> None:
    """Into pages full of garbage: the unit's slabs, the page fields, the magic and the unit's flags; no
    more."""
    fmt = bind(name, 128, 128)
    before = garbage(fmt, 3)
    pages = before.clone()
    unit = fmt.N // fmt.unit - 1
    fmt.write(pages, torch.tensor([1]), torch.tensor([unit]), units(fmt, 1))
    assert torch.equal(pages[[0, 2]], before[[0, 2]])
    own = torch.zeros(fmt.record_bytes, dtype=torch.bool)
    first = unit * fmt.unit // 32
    own[:4] = own[64 : fmt.slabs_at] = True
    own[16 + first : 16 + fmt.slabs] = True
    own[fmt.slabs_at + first * fmt.slab_region.nbytes : fmt.slabs_at + fmt.slabs * fmt.slab_region.nbytes] = True
    assert torch.equal(pages[1][:, ~own], before[1][:, ~own])
    assert (pages[1, :, :4].contiguous().view(torch.int32) == MAGIC).all()
    assert bytes(pages[1, 0, :4].tolist()) == b"KVQ1"
    assert (pages[1, :, 16 + first : 16 + fmt.slabs] == 1).all()


@pytest.mark.parametrize("name", PACKED)
def test_absolute_offsets(name: str) -> None:
    """header 64, page fields, slabs: each field on the next 64-byte boundary in the order of the codec's list, but the
    second of two short ones in the line of the first."""
    fmt = bind(name, 128, 128)
    fields = units(fmt, fmt.N // fmt.unit)
    pages = garbage(fmt, 1)
    fmt.write(pages, torch.zeros(fmt.N // fmt.unit, dtype=torch.long), torch.arange(fmt.N // fmt.unit), fields)
    record = pages[0, 1]  # head 1
    at = 64

    def check(listed: tuple[Field, ...], stored: Callable[[torch.Tensor], torch.Tensor]) -> None:
        nonlocal at
        rest = None  # of a short field's line
        for f in listed:
            place, short = at, f.nbytes <= 32
            if short and rest:
                place, rest = rest, None
            else:
                rest = at + 32 if short else rest
                at = round_up(at + f.nbytes, 64)
            want = stored(fields[f.name].to(f.dtype).unflatten(0, (-1, HEADS))[:, 1])
            assert torch.equal(record[place : place + f.nbytes], want.contiguous().flatten().view(torch.uint8)), f.name

    check(fmt.keys.page_fields + fmt.values.page_fields, lambda of_units: of_units[-1])
    for slab in range(fmt.slabs):
        check(fmt.keys.slab_fields + fmt.values.slab_fields, lambda of_units: of_units.flatten(0, 1)[slab])  # noqa: B023
    assert round_up(at, 128) == fmt.record_bytes

"""The names that the library and its table of codecs must agree on."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from cpu_fuzzing import IN_CPP

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.methods.squat import ChannelKeys
from vllm_kvq.formats.parts.fields import Field
from vllm_kvq.kernels.cpu import call, layout
from vllm_kvq.kernels.cpu.fields import Fields
from vllm_kvq.kernels.cpu.library import ISAS, library
from vllm_kvq.kernels.cpu.tuples import Part
from vllm_kvq.kernels.torch.lists import PageList

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
NO_PAGES = PageList(*(torch.zeros(0, dtype=torch.int64),) * 4)


class Edited:
    """The library, with some of its names replaced."""

    def __init__(self, what: str, old: str, new: str) -> None:
        self.what, self.old, self.new = what, old, new

    def names(self, what: str) -> str:
        text = str(library().names(what))  # type: ignore[union-attr]
        if what == self.what:
            assert self.old in text
            text = text.replace(self.old, self.new, 1)
        return text


def bound(name: str) -> PageFormat:
    return get_format(name).bind(Geometry(64, 64, torch.bfloat16))


@pytest.mark.parametrize(
    ("what", "old", "new", "says"),
    [
        ("layout", "k_zero:q ", "", "has no k_zero"),
        ("layout", "k_zero:q ", "k_naught:q ", "has no k_zero"),
        ("layout", "k_zero:q ", "k_zero:q k_naught:q ", "also has k_naught"),
        ("layout", "k_zero:q ", "k_scale:q ", "names k_scale more than once"),
        ("keys", "sketch", "sketched", "kinds of keys"),
        ("values", "hybrid ", "", "kinds of values"),
        ("values", "hybrid", "token", "kinds of values"),
        ("dtypes", "f16 ", "", "types are"),
        ("numbers", "LIMIT:32768", "LIMIT:32767", "numbers are .*LIMIT:32767, .* and not .*LIMIT:32768"),
        ("numbers", "FLAGS_AT:16 ", "", "numbers are"),
        (
            "tuples",
            "PageList:ids,owner,",
            "PageList:owner,ids,",
            "tuples are PageList:owner,ids.*, and not PageList:ids",
        ),
        ("tuples", "Pair:key,value ", "", "tuples are"),
    ],
)
def test_names_that_only_one_side_knows(what: str, old: str, new: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        layout.Names.of(Edited(what, old, new))


@pytest.mark.parametrize(
    ("what", "old"),
    [("companions", "ring_at:q "), ("companions", "window:q "), ("scores", "cap:f "), ("team", "isa:i ")],
)
def test_structs_are_filled_by_name(what: str, old: str) -> None:
    less: Fields = getattr(layout.Names.of(Edited(what, old, "")), what)
    given = dict.fromkeys(getattr(layout.names(), what).names, 0)
    with pytest.raises(ValueError, match=f"{what} has no {old[:-3]}"):
        less.fill(given, what)


def test_a_tuple_of_another_length_is_refused() -> None:
    fmt, lib = bound("kivi2"), library()
    assert lib is not None
    pages = torch.zeros(1, 1, fmt.record_bytes, dtype=torch.uint8)
    for count in (3, 5):
        with pytest.raises(ValueError, match=f"PageList has 4 tensors, not {count}"):
            lib.unpacked_page(layout.bind(fmt), pages, (NO_PAGES.ids,) * count)


@pytest.mark.parametrize(
    ("team", "scores", "says"),
    [
        ((0, 0), (1.0, 0.0), "needs a thread"),
        ((1, 9), (1.0, 0.0), "instruction set"),
        ((1, 0), (1.0, -1.0), "soft cap"),
    ],
)
def test_numbers_that_no_call_can_have(team: tuple[int, int], scores: tuple[float, float], says: str) -> None:
    fmt, lib = bound("kivi2"), library()
    assert lib is not None
    query, pages = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, fmt.record_bytes, dtype=torch.uint8)
    into = Part(torch.empty(1, 1, 1, 64), torch.empty(1, 1, 1))
    with pytest.raises(ValueError, match=says):
        lib.attend_packed(layout.bind(fmt), query, pages, NO_PAGES, call.scores(*scores), into, call.team(*team))


def test_the_order_does_not_matter() -> None:
    """Two fields that swap places in the library's list are filled where they are now."""
    fmt, real = bound("kivi2"), layout.Names.of(library())
    swapped = layout.Names.of(Edited("layout", "k_scale:q k_zero:q", "k_zero:q k_scale:q"))
    a, b = (layout.lay_out(fmt, names)[: 8 * len(real.layout.names)].view(torch.int64) for names in (real, swapped))  # type: ignore[index]
    scale, zero = (real.layout.names.index(n) for n in ("k_scale", "k_zero"))
    assert a[scale] != a[zero]
    assert (a[scale], a[zero]) == (b[zero], b[scale])


@pytest.mark.parametrize("name", IN_CPP)
def test_every_format_is_served(name: str) -> None:
    assert layout.bind(bound(name)) is not None


def test_a_codec_of_another_class_is_not_mistaken_for_ours() -> None:
    class Others(ChannelKeys):
        pass

    fmt = bound("kivi2")
    other = replace(fmt, keys=Others(fmt.geometry, {"key_bits": 2}))
    assert layout.bind(other) is None
    assert layout.reduction(other) is None


def test_a_codec_that_stores_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = bound("kivi2")
    more = (*fmt.keys.slab_fields, Field("k_more", torch.uint8, (64,)))
    monkeypatch.setattr(ChannelKeys, "slab_fields", more)
    with pytest.raises(ValueError, match="ChannelKeys stores"):
        layout.lay_out(fmt, layout.Names.of(library()))


def test_a_layout_of_another_size_is_refused() -> None:
    fmt, lib = bound("polar4"), library()
    assert lib is not None
    whole = layout.bind(fmt)
    assert whole is not None
    pages = torch.zeros(1, 1, fmt.record_bytes, dtype=torch.uint8)
    assert lib.unpacked_page(whole, pages, NO_PAGES) == -1
    for wrong in (whole[:16], whole[:-4], torch.cat([whole, whole[:4]])):
        with pytest.raises(ValueError, match=r"layout|fields"):
            lib.unpacked_page(wrong, pages, NO_PAGES)


@pytest.mark.parametrize(
    ("name", "table", "number"),
    [
        ("kivi2", "KEYS", "key_bits"),
        ("polar3", "KEYS", "radius_bits"),
        ("kitty2", "KEYS", "boosted"),
        ("qjl3", "KEYS", "outer_rows"),
        ("qjl3", "VALUES", "value_bits"),
        ("kivi2", "VALUES", "group"),
    ],
)
def test_a_kind_without_one_of_its_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, table: str, number: str
) -> None:
    """When another kind of value gives the number, only the names agree; what the library reads is then 0."""
    fmt, lib = bound(name), library()
    assert lib is not None
    known = getattr(layout, table)
    codec = type(fmt.keys if table == "KEYS" else fmt.values)
    less = {k: v for k, v in known[codec].numbers.items() if k != number}
    assert len(less) == len(known[codec].numbers) - 1
    names = layout.Names.of(lib)
    monkeypatch.setitem(known, codec, replace(known[codec], numbers=less))
    pages = torch.zeros(1, 1, fmt.record_bytes, dtype=torch.uint8)
    with monkeypatch.context() as patched:
        # the check of names is not what is tested here
        patched.setattr(Fields, "check", lambda *_: None)
        patched.setattr(Fields, "fill", _filled_with_zeros)
        wrong = layout.lay_out(fmt, names)
    with pytest.raises(ValueError, match=r"codes|rows|groups"):
        lib.unpacked_page(wrong, pages, NO_PAGES)


def _filled_with_zeros(fields: Fields, values: dict[str, float], what: str) -> bytes:
    return struct.pack(f"={fields.letters}", *(values.get(name, 0) for name in fields.names))


def test_instruction_sets_are_counted_alike() -> None:
    known = str(library().names("isas")).split()  # type: ignore[union-attr]
    assert tuple(known) == ISAS[: len(known)]

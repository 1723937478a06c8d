"""What is said about slow formats is what the C++ library does: options, head sizes and instruction sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from one_each import KINDS

from vllm_kvq.bench import slow as bench
from vllm_kvq.bench.pools import random_pages
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.table import declared_options, public_formats
from vllm_kvq.kernels.cpu import attend, call, slow
from vllm_kvq.kernels.cpu.library import ISAS, isa, library
from vllm_kvq.kernels.paths import Wish, path_for
from vllm_kvq.kernels.torch.lists import PageList

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
HERE = range(isa() + 1) if library() is not None else ()


def bound(name: str, head_size: int, options: dict[str, Any] | None = None) -> PageFormat:
    return get_format(name).bind(Geometry(head_size, 128, torch.bfloat16), options or {})


def values(option: Option) -> tuple[Any, ...]:
    """Every choice; several values of ranges that decide about kernels, one of others."""
    if option.choices:
        return option.choices
    if option.name in ("m", "m_out"):  # few: a sketch takes its time
        return (64, 128)
    if option.name == "seed":
        return (1,)
    if option.name == "group":
        return (16, 32, 48, 64, 96, 128, 256)
    return (int(option.low) + option.multiple if option.multiple else option.low,)


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every public format, by default and with each value of each option, as far as they are served."""
    for fmt in public_formats():
        yield fmt.name, {}
        settings = fmt.settings()
        for option, readers in declared_options():  # options that every format has don't concern the kernels
            if option.name in ("keys", "values") or settings.keys.name in readers or settings.values.name in readers:
                for value in values(option):
                    try:
                        found = bound(fmt.name, 128, {option.name: value})
                    except ValueError:  # not read by this format, or not with its other options
                        continue
                    if not found.reference_only:
                        yield fmt.name, {option.name: value}


VARIANTS = list(variants())
WALKED = (64, 80, 128, 192)
"""Stored as they are and padded."""


@pytest.fixture
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The sentences of many formats ask the library about the same ones: it answers each question once."""
    monkeypatch.setattr(slow, "isa", lambda: request.param)
    answers: dict[Any, bool] = {}
    ask = slow._fast

    def once(fmt: PageFormat, half: str, options: Mapping[str, Any], head_size: int | None = None) -> bool:
        about = fmt.name, fmt.geometry, half, tuple(sorted(options.items())), head_size
        if about not in answers:
            answers[about] = ask(fmt, half, options, head_size)
        return answers[about]

    monkeypatch.setattr(slow, "_fast", once)
    return int(request.param)


def left_out(sentence: str) -> list[str]:
    return re.findall(r"'(\w+)'", sentence.partition("; ")[2])


@pytest.mark.parametrize("level", HERE, indirect=True, ids=lambda i: ISAS[i])
def test_the_sentence_follows_the_kernels(level: int) -> None:
    said = 0
    for name, options in VARIANTS:
        for d in WALKED:
            fmt = bound(name, d, options)
            sentence, halves = slow.slow(fmt), slow.integer_halves(fmt)
            by_slab = fmt.settings.get("outlier_choice") == "slab"
            if halves == slow.HALVES:
                assert (sentence is not None) == by_slab, (name, options, d)
            else:
                assert sentence is not None, (name, options, d)
            if sentence is None:
                continue
            said += 1
            assert "\n" not in sentence
            for half in slow.HALVES:
                assert (half in sentence.partition("; ")[0]) == (half not in halves or (by_slab and half == "keys"))
            # what it says to leave out makes the named half fast, or it says that nothing here does
            rest = {k: v for k, v in options.items() if k not in left_out(sentence)}
            if "--kv-cache-dtype auto" not in sentence:
                assert rest != options
                assert slow.slow(bound(name, d, rest)) is None, (name, options, d)
            elif not left_out(sentence):
                assert slow.slow(bound(name, d)) is not None, (name, options, d)
    assert 0 < said < len(VARIANTS) * len(WALKED) or ISAS[level] == "portable"


@pytest.mark.parametrize("level", [i for i in HERE if ISAS[i] != "portable"], indirect=True, ids=lambda i: ISAS[i])
def test_known_cases(level: int) -> None:
    sizes = "64, 80, 96, 112, 128, 192 and 256"
    for name in KINDS:
        for d in HEAD_SIZES if name not in ("qjl3", "polar4") else HEAD_SIZES[:-1]:
            assert slow.slow(bound(name, d)) is None
    assert slow.slow(bound("polar4", 512)) == (
        "polar4 is attended slowly here: the fast kernels don't serve its keys "
        f"at head size 512 (they do at {sizes}); --kv-cache-dtype auto may be faster"
    )
    assert slow.slow(bound("innerq2", 128, {"key_bits": 4, "value_bits": 4})) == (
        "innerq2 is attended slowly here: the fast kernels don't serve its keys with key_bits=4 and its values with "
        "value_bits=4; leave out 'key_bits' and 'value_bits'"
    )
    assert slow.slow(bound("qjl3", 512, {"outliers": 0})) is None
    assert slow.slow(bound("qjl3", 128, {"m": 1024, "m_out": 1024})) is None
    assert slow.slow(bound("qjl3", 128, {"m_out": 1056})) == (
        "qjl3 is attended slowly here: the fast kernels don't serve its keys with m_out=1056; leave out 'm_out'"
    )
    # only what is responsible
    assert slow.slow(bound("squat2", 128, {"value_bits": 4, "group": 16})) == (
        "squat2 is attended slowly here: the fast kernels don't serve its values with group=16; leave out 'group'"
    )
    assert slow.slow(bound("polar4_v16", 128)) == (
        "polar4_v16 is attended slowly here: the fast kernels don't serve its values as polar4_v16 stores them; "
        "--kv-cache-dtype auto may be faster"
    )
    assert slow.slow(bound("squat4", 512, {"keys": "polar"})) == (
        "squat4 is attended slowly here: the fast kernels don't serve its keys of the codec 'polar'; leave out 'keys'"
    )


def test_cpp_serves_every_one() -> None:
    for name, options in VARIANTS:
        assert path_for(bound(name, 128, options), Wish("cpu")).name == "C++", (name, options)


def test_the_bench_times_every_option_that_is_slow() -> None:
    """And no other option: the table of docs/benchmarks.md is complete."""
    if ISAS[isa()] == "portable":
        pytest.skip("everything is slow there")
    slow_alone = {fmt.name for fmt in public_formats() if slow.slow(bound(fmt.name, bench.USUAL_HEAD))}
    assert slow_alone == {"polar4_v16"}
    found = {
        (n, o)
        for n, options in VARIANTS
        for o in options
        if n not in slow_alone and slow.slow(bound(n, bench.USUAL_HEAD, options))
    }
    slow_options = {option for _, option in found if option != "keys"}
    assert {option for _, options in bench.OPTIONS for option in options} == slow_options
    assert all(slow.slow(bound(name, bench.USUAL_HEAD, dict(options))) for name, options in bench.OPTIONS)


def test_the_path_says_it() -> None:
    fmt = bound("squat2", 128, {"group": 16})
    path = path_for(fmt, Wish("cpu"))
    assert path.slow
    assert (path.name, path.why, path.slow) == ("C++", None, slow.slow(fmt))
    assert path_for(fmt, Wish("cpu", "torch")).slow is None


@pytest.mark.parametrize(
    ("name", "d", "options"),
    [("squat2", 64, {}), ("squat2", 96, {}), ("polar4", 192, {}), ("innerq2", 64, {"key_bits": 4, "value_bits": 4})],
)
def test_integer_kernels_round_and_float32_kernels_do_not(
    name: str, d: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's answer is about what it computes: only integer products differ from the portable kernels'."""
    if ISAS[isa()] != "avx512":
        pytest.skip("the answer for this case is that of AVX-512 with VNNI")
    fmt = bound(name, d, options)
    pages = random_pages(fmt, 2, 1)
    query = torch.randn(1, 1, 2, d, generator=torch.Generator().manual_seed(1))
    ids, owner, low = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    outputs = []
    for used in (isa(), 0):
        monkeypatch.setattr(call, "isa", lambda used=used: used)
        outputs.append(attend.attend_packed(fmt, query, pages, PageList(ids, owner, low, low + 128), d**-0.5)[0])
    difference = ((outputs[0] - outputs[1]).norm() / outputs[1].norm()).item()
    assert (difference > 1e-5) == bool(slow.integer_halves(fmt)), difference

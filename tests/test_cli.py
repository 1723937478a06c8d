"""The table of `vllm-kvq formats`: every number stands in its column."""

from __future__ import annotations

import re

import pytest

from vllm_kvq import cli
from vllm_kvq.formats import FORMATS

HEADS, BLOCKS = (64, 96, 128), (64, 160)


def rows(text: str) -> tuple[list[tuple[int, int]], dict[str, list[tuple[float, float]]]]:
    """The columns' (head size, block size), and each format's (bits, factor) in them."""
    head, names, *lines = text.split("\n\n")[0].splitlines()
    columns = [(int(d), int(n)) for d, n in re.findall(r"d=(\d+) N=(\d+)", head)]
    assert re.split(r"\s{2,}", names.strip()) == ["bits", "factor"] * len(columns)
    found = {}
    for line in lines:
        cells = re.findall(r"(\d+\.\d{4})\s+(\d+\.\d{2})x", line)
        assert len(cells) == len(columns)
        found[line.split()[0]] = [(float(bits), float(factor)) for bits, factor in cells]
    return columns, found


def test_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["formats", "--head-size", *map(str, HEADS), "--block-size", *map(str, BLOCKS)]) == 0
    columns, found = rows(capsys.readouterr().out)
    assert columns == [(d, n) for d in HEADS for n in BLOCKS]
    assert list(found) == list(FORMATS)
    for name, cells in found.items():
        for (d, n), (bits, factor) in zip(columns, cells, strict=True):
            assert bits == round(FORMATS[name].bits_per_element(d, n), 4)
            assert factor == round(FORMATS[name].capacity_factor(d, n), 2)
            # one follows from the other
            assert factor == pytest.approx(16 / bits, abs=0.01)


def test_the_columns_differ() -> None:
    """The control: numbers of another column would be noticed."""
    squat = FORMATS["squat2"]
    assert len({round(squat.bits_per_element(d, n), 4) for d in HEADS for n in BLOCKS}) == len(HEADS) * len(BLOCKS)


def test_titles_stand_beside_their_formats(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["formats"])
    lines = capsys.readouterr().out.splitlines()
    for fmt in FORMATS.values():
        assert any(line.startswith(f"{fmt.name} ") and f"  {fmt.title}  " in line for line in lines)


def test_a_head_size_that_no_format_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["formats", "--head-size", "72"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("vllm-kvq: ")

"""What `bench` leaves in --out: the right numbers on the page, in the CSV and in the plot; nothing without --out.

What is true of every page, these included, is in test_result_pages.py.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up_benches import H200, MODEL, NINE, REFUSED, RUNS, run, speed

from vllm_kvq import drawing
from vllm_kvq.bench import figures, slow
from vllm_kvq.bench.figures import Curves
from vllm_kvq.bench.gpu import kept
from vllm_kvq.bench.gpu.results import Results
from vllm_kvq.cli.page.plots import NO_PLOT
from vllm_kvq.console import Table
from vllm_kvq.formats.table import public_formats
from vllm_kvq.kernels.cpu.processor import processor_name

NAMES = NINE.split(",")
CSVS = {"chunk": "prefill", "gpu": "gpu-dry-run-times-mean-nothing"}
"""Files that are not named after their command."""
Drawn = list[tuple[dict[str, Curves], figures.Scale]]


def rows(path: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(path.open(encoding="utf-8"))]


def by_name(table: Table) -> dict[str, dict[str, str]]:
    """The first row of each name in the table's first column; its cells by their heads."""
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in reversed(table.rows)}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What commands have drawn."""
    seen: Drawn = []
    draw = figures.draw

    def spied(path: Path, panels: dict[str, Curves], title: str, scale: figures.Scale) -> drawing.Picture:
        seen.append((panels, scale))
        return draw(path, panels, title, scale)

    monkeypatch.setattr(figures, "draw", spied)
    monkeypatch.setattr(kept, "draw", spied)
    return seen


# -- what is written --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in RUNS if name != "plot"])
def test_nothing_is_written_without_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except the plot that `bench plot` is asked for. Nor does a command limit the caches of what its caller runs
    next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    ran = run(name, tmp_path, monkeypatch, out=False)
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert ran.status in (0, 1)
    assert {path.name for path in tmp_path.iterdir()} <= {MODEL}


@pytest.mark.parametrize("name", RUNS)
def test_a_report_numbers_and_a_plot_are_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even with --json, which still prints one JSON document."""
    ran = run(name, tmp_path, monkeypatch, True, "--json")
    assert ran.status == (1 if name == "decode" else 0)
    assert capsys.readouterr().out.startswith("{\n")
    stem = CSVS.get(name, name)
    wanted = {"report.html", f"{stem}.csv", f"{stem}.png"}
    if name == "gpu":
        wanted.add(f"{stem}.md")
    if name == "plot":  # it reads a CSV that is elsewhere
        wanted = {"report.html", "gpu-nvidia-h200.png"}
    assert {path.name for path in ran.out.iterdir()} == wanted
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in ran.out.glob("*.png"))
    page = (ran.out / "report.html").read_text()
    assert f"<h1>vllm-kvq {' '.join(ran.words[:2])}" in page
    assert shlex.join(["--out", str(ran.out)]) in page
    assert processor_name() in page
    assert page.count("<svg") == 1


@pytest.mark.parametrize("name", RUNS)
def test_without_matplotlib_there_is_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = run(name, tmp_path, monkeypatch)
    assert not [*ran.out.glob("*.png")]
    assert NO_PLOT in (ran.out / "report.html").read_text()
    assert ran.tables


# -- the numbers ------------------------------------------------------------------------------------------------------
def test_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    ran = run("decode", tmp_path, monkeypatch)
    (table,) = ran.tables
    assert [row[0] for row in table.rows] == NAMES
    assert by_name(table)["kitty2"] == {"format": "kitty2", "tokens/s": "175", "bf16 tokens/s": "100", "x bf16": "1.75"}
    assert ran.notes == ["slower than 1.7 of bf16: kivi2, kivi4, klt3, qjl3"]
    found = {row["format"]: float(row["ratio"]) for row in rows(ran.out / "decode.csv")}
    assert found == {name: speed(name) for name in NAMES}
    ((panels, scale),) = drawn
    assert panels == {"": {name: [(512, speed(name))] for name in NAMES}}
    assert scale.label == "times as fast as bf16"


def test_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    ran = run("prefill", tmp_path, monkeypatch)
    (table,) = ran.tables
    assert len(table.rows) == 2 * len(NAMES)
    assert [*table.rows[0]] == ["kitty2", "64", "12.5", "25.0", "1000.0", "990.0", "1.2%", "2.5%"]
    found = rows(ran.out / "prefill.csv")
    assert [(row["format"], row["tokens"]) for row in found[:: len(NAMES)]] == [("kitty2", "64"), ("kitty2", "256")]
    assert {(row["fit_ms"], row["pack_ms"], row["pack_share"]) for row in found} == {("12.5", "25.0", "0.025")}
    ((panels, scale),) = drawn
    assert panels[""]["squat2:W=64"] == [(64, pytest.approx(3.75)), (256, pytest.approx(3.75))]
    assert "%" in scale.label


def test_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    ran = run("chunk", tmp_path, monkeypatch)
    (table,) = ran.tables
    assert [*table.rows[0]] == ["kitty2", "32", "64", "100.0", "57.1", "1.75"]
    assert {(row["tokens"], row["context"]) for row in rows(ran.out / "prefill.csv")} == {("32", "64"), ("32", "256")}
    ((panels, scale),) = drawn
    assert panels[""]["kitty2"] == [(64, 1.75), (256, 1.75)]
    assert scale.label == "times as fast as vLLM"


def test_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    """The page's tables have no Markdown in them."""
    ran = run("slow", tmp_path, monkeypatch)
    heads, options = ran.tables
    assert [row[0] for row in heads.rows] == [fmt.name for fmt in public_formats()]
    assert by_name(heads)["squat2"] == {"times bf16": "squat2", "d = 80": "0.80", "d = 96": "0.67", "d = 192": "0.33"}
    assert [*options.rows[0]] == ["squat2", "group: 16", "0.50", "2.5"]
    assert len(options.rows) == len(slow.OPTIONS)
    ((panels, _),) = drawn
    by_default = {name for name, _ in slow.OPTIONS}
    assert [len(curves) for curves in panels.values()] == [*[len(heads.rows)] * 3, len(slow.OPTIONS) + len(by_default)]
    assert panels["d = 80"]["squat2"] == [(256, 0.8)]
    assert len(rows(ran.out / "slow.csv")) == sum(1 + len(curves) for curves in panels.values())


def test_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    ran = run("serve", tmp_path, monkeypatch)
    servers, attention = ran.tables
    assert len(servers.rows) == len(attention.rows) == 4 * len(NAMES)
    first = ["kitty2", "64", "1", "6.40", "3.66", "1.75", "156.2", "273.4", "400", "500", "0.80"]
    assert [*servers.rows[0]] == first
    assert [*attention.rows[0]] == ["kitty2", "64", "1", "1.75", "", "4.00", "", ""]
    assert [*attention.rows[1]] == ["kitty2", "256", "1", "1.75", "50%", "4.00", "1.60", "2.00"]
    assert [*attention.head] == ["format", "context", "batch", "ratio", "share", "kernel", "expected", "at most"]
    found = rows(ran.out / "serve.csv")
    assert (found[0]["plain_step"], found[0]["packed_first"], found[0]["share"]) == ("0.0064", "0.5", "")
    ((panels, _),) = drawn
    assert [*panels] == ["batch 1", "batch 4"]
    assert panels["batch 4"]["kitty2"] == [(64, 1.75), (256, 1.75)]


def test_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A point for each cache, eight of them with names."""
    shown: list[tuple[dict[str, tuple[float, float]], str, str]] = []
    points = figures.points

    def spied(axes: Any, found: dict[str, tuple[float, float]], across: str, up: str) -> None:
        shown.append((found, across, up))
        points(axes, found, across, up)

    monkeypatch.setattr(figures, "points", spied)
    ran = run("capacity", tmp_path, monkeypatch)
    assert len(rows(ran.out / "capacity.csv")) == 1 + len(NAMES)
    found = {name: (2 * speed(name), 50 * speed(name)) for name in ("bf16", *NAMES)}
    assert shown == [(found, "requests in flight", "output tokens per second")]
    (picture,) = ran.drawn
    assert [texts(picture).count(name) for name in found] == [1] * 8 + [0] * (len(found) - 8)


def test_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    """flash_attn takes 32 and 64 us, kitty2 a quarter of sdpa's 64 and 128."""
    ran = run("gpu", tmp_path, monkeypatch)
    steps, growth, packing, chunk = ran.tables
    assert [(row[0], row[2]) for row in steps.rows[:4]] == [
        ("sdpa", "128"), ("flash_attn", "128"), ("kitty2", "128"), ("klt3", "128")
    ]  # fmt: skip
    assert {name: row["x bf16"] for name, row in by_name(steps).items()} == {
        "sdpa": "0.50", "flash_attn": "1.00", "kitty2": "2.00", "klt3": "2.50"
    }  # fmt: skip
    assert [*growth.rows[0]] == ["kitty2", "2", "125.000", "64"]
    assert [*packing.rows[0]] == ["kitty2", "1000.0", "50.0%"]
    assert [*map(list, chunk.rows)] == [["kitty2", "-", "-", "4000", "4.00"]]
    assert REFUSED in ran.notes
    assert steps.title.startswith("Decode steps: torch ")
    assert "<h1>vllm-kvq bench gpu: dry run: times mean nothing</h1>" in (ran.out / "report.html").read_text()
    ((panels, _),) = drawn
    assert {name: dict(points)[128] for name, points in panels["batch 2"].items()} == pytest.approx(
        {"fp8": 1.5, "kitty2": 2.0, "klt3": 2.5}
    )


def test_the_page_of_a_csv_has_the_numbers_that_were_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them, of what was measured on an H200, in the order in which they were printed."""
    ran = run("plot", tmp_path, monkeypatch)
    steps, growth, packing, chunk = ran.tables
    printed = [line.split() for line in H200.with_suffix(".md").read_text().splitlines() if line.startswith("    ")]
    lines = printed[2:]
    assert [[*row] for row in steps.rows] == lines[: len(steps.rows)]
    assert len(steps.rows) > 80
    told = lines[len(steps.rows) + 1 :]
    assert [[*row] for row in growth.rows] == [[w[0], w[2], w[4], w[6]] for w in told if "break-even" in w[5:6]]
    assert [[*row] for row in packing.rows] == [[w[0], w[1], w[3]] for w in told if w[-2:] == ["the", "layer"]]
    assert [[*row] for row in chunk.rows] == [
        [w[0], w[1], w[4].strip("()"), w[5], w[9].strip("()")] for w in told if w[-2] == "pages"
    ]
    assert (len(growth.rows), len(packing.rows), len(chunk.rows)) == (21, 7, 7)
    page = (ran.out / "report.html").read_text()
    assert "perhaps not those that measured" in page
    assert "2.11.0+cu130" in page


def test_a_page_of_several_devices_says_whose_each_table_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "gpu-other.csv"
    other.write_text("".join(H200.read_text().splitlines(keepends=True)[:12]))
    ran = run("plot", tmp_path, monkeypatch, True, str(other))
    assert [table.title.partition(", ")[0] for table in ran.tables] == ["nvidia-h200"] * 4 + ["other"] * 2
    assert capsys.readouterr().out.splitlines() == [
        str(ran.out / name) for name in ("report.html", "gpu-nvidia-h200.png", "gpu-other.png")
    ]


def test_only_the_newest_torch_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, seconds in (("1.0", 1.0), ("2.0", 2.0)):
        monkeypatch.setattr("torch.__version__", version)
        results = Results(tmp_path, "A GPU")
        results.take("copy", 0, 0, lambda: (1e-12, 1))
        results.take("sdpa", 1, 64, lambda: (8.0, 100))
        results.take("squat2", 1, 64, lambda seconds=seconds: (seconds, 100))  # type: ignore[misc]
    found = kept.Kept.of(tmp_path / "gpu-a-gpu.csv")
    assert (found.device, found.torch) == ("a-gpu", "2.0")
    assert found.panels() == {"batch 1": {"squat2": [(64, 4.0)]}}


# -- the plots --------------------------------------------------------------------------------------------------------
def texts(picture: drawing.Picture) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", picture.svg)


def test_curves_are_named_where_they_end_and_are_eight_at_most(tmp_path: Path) -> None:
    names = ["klt4", "bf16", "klt3", "fp8", "kivi4", "kitty2", "squat2", "polar4", "innerq2", "kivi2"]
    curves: Curves = {name: [(1024, 1.0 + n), (4096, 2.0)] for n, name in enumerate(names)}
    picture = figures.draw(tmp_path / "a.png", {"above": curves}, "title", figures.MILLISECONDS)
    said = texts(picture)
    shown = ["klt4", "bf16", "klt3", "fp8", "kivi4", "kitty2", "squat2", "kivi2"]
    assert {name: said.count(name) for name in names} == {name: int(name in shown) for name in names}
    assert {"1k", "4k", "above", "tokens in the cache, per request", "ms per decode step and layer"} <= {*said}
    assert picture.title.startswith("title\n8 of 10 are drawn")
    assert "legend" not in picture.svg
    picture = figures.draw(tmp_path / "b.png", {"": {"kitty2": curves["klt4"]}}, "title", figures.times("bf16"))
    assert picture.title == "title"
    assert texts(picture).count("bf16") == 1


def test_one_context_makes_bars_with_their_figures(tmp_path: Path) -> None:
    curves: Curves = {f"format{n}": [(1024, 1.5 + n)] for n in range(12)}
    picture = figures.draw(tmp_path / "a.png", {"": curves}, "title", figures.times("bf16"))
    said = texts(picture)
    assert all(said.count(name) == 1 and f"{points[0][1]:.2f}" in said for name, points in curves.items())
    assert picture.title == "title"
    assert "times as fast as bf16" in said


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("contexts", [(1024,), (1024, 4096)])
def test_what_is_slower_than_all_bars_and_curves_is_in_the_plot(contexts: tuple[int, ...], tmp_path: Path) -> None:
    """bf16 stands at 1 even where everything else is far below it."""
    curves: Curves = {"kitty2": [(context, 0.1) for context in contexts]}
    picture = figures.draw(tmp_path / "a.png", {"": curves}, "title", figures.times("bf16"))
    assert {"1.0", "bf16"} <= {*texts(picture)}


def test_names_do_not_cover_each_other() -> None:
    assert drawing.apart([0.1, 0.5, 0.9], 0.05) == [0.1, 0.5, 0.9]
    assert drawing.apart([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    # what is pushed aside pushes others
    found = drawing.apart([0.30, 0.38, 0.40, 0.41, 0.9], 0.1)
    assert found == pytest.approx([0.2225, 0.3225, 0.4225, 0.5225, 0.9])

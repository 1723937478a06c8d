"""Plots, tables of hurt tokens, and the commands that show them, on made-up results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_kvq import cli
from vllm_kvq.cli.eval.heads import table
from vllm_kvq.cli.eval.hurt import hurt_tables
from vllm_kvq.drawing import pyplot
from vllm_kvq.eval.heads.heads import HeadError
from vllm_kvq.eval.results import frontier, plots, report
from vllm_kvq.eval.results.result import DECODING, METRICS, TEACHER_FORCED, Bin, Estimate, Hurt, Results, Row
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.table import suite
from vllm_kvq.naming import QUIET

PNG = b"\x89PNG"


def row(name: str, bits: float | None, kl: float, task: str = "text", regime: str = TEACHER_FORCED) -> Row:
    kls = {"kl": Estimate(kl, kl / 2, kl * 2)}
    return Row(
        "model", name, {}, task, regime, 1024, 4, bits, metrics=kls | {"accuracy": Estimate(1 - kl)},
        by_position={"kl": (Bin(0, 512, 9, kls["kl"]), Bin(512, 1024, 9, Estimate(3 * kl)))},
        by_depth={"accuracy": (Bin(0, 0.5, 4, Estimate(1.0)), Bin(0.5, 1, 4, Estimate(0.5)))},
        hurt=(Hurt("a\nb " * 20, "cat", " sat" * 20, 77, 1.25, 0.01, 0.9), Hurt("x", "y", "z", 5, 0.5, 0.2, 0.4)),
    )  # fmt: skip


ROWS = [row("auto", 16.0, 0.0), row("squat2", 3.2, 0.2), row("squat4", 5.2, 0.02), row("kivi2", 3.2, 0.3)]


def test_what_bf16_can_not_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """And only for bf16's own rows: a format that is wrong is what the table is for."""
    sure, unsure, wrong = row("auto", 16.0, 0.05, "needle"), row("auto", 16.0, 0.051, "recall"), row("squat2", 3.0, 0.5)
    report.show(Results((sure, unsure, wrong)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "bf16 is right" in line]
    about = "1024 tokens, teacher-forced: bf16 is right in"
    assert lines == [
        f"needle, {about} 95.0 % of 8 answers",
        f"recall, {about} 94.9 % of 8 answers; less than 95 %, so nothing is claimed from this table",
    ]


def test_errors_by_position_of_continuations(capsys: pytest.CaptureFixture[str]) -> None:
    plain, ours = (row(name, 16.0, 0.25, regime=DECODING) for name in ("auto", "squat2"))
    along = (Bin(0, 128, 9, Estimate(0.5)), Bin(128, 256, 9, Estimate(0.75)))
    ours = replace(ours, metrics={"kl_forced": Estimate(0.6)}, by_position={"kl": along, "kl_forced": along[::-1]})
    report.show(Results((plain, ours)))
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if "KL by tokens generated before" in line)
    assert lines[begin + 2].split() == ["squat2", "its", "own", "text", "0.5", "0.75"]
    assert lines[begin + 3].split() == ["squat2", "bf16's", "text", "0.75", "0.5"]


@pytest.fixture
def axes() -> Iterator[Any]:
    plt = pyplot()
    figure, made = plt.subplots()
    yield made
    plt.close(figure)


def points(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Those that are drawn, by marker; lines have the marker None."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in axes.get_lines():
        found.setdefault(line.get_marker(), []).extend(map(tuple, line.get_xydata()))
    return found


def test_the_line_is_of_our_best_and_peers_are_markers(axes: Any) -> None:
    rows = [*ROWS[1:], row("polar4", 5.5, 0.04), row("fp8", 8.0, 0.001)]
    names, others = frontier.frontier(axes, rows, "kl")
    assert points(axes)["None"] == [(3.2, 0.2), (5.2, 0.02)]
    assert points(axes)["s"] == [(3.2, 0.3), (8.0, 0.001)]
    assert points(axes)["o"] == [(3.2, 0.2), (5.2, 0.02), (5.5, 0.04)]
    assert [(name.text, name.at) for name in names] == [(r.label, (r.bits, r.metrics["kl"].value)) for r in rows]
    assert others == []
    assert axes.get_legend() is None
    assert axes.get_xlabel() == "bits per number, everything counted"


def test_eight_points_have_names_and_the_others_are_grey(axes: Any) -> None:
    """Budgets' formats and the usual ones, which users choose, come first, then ours in order; the rest are counted."""
    of_budgets = [name for budget in BUDGETS.values() for name in budget.formats]
    names = ["squat4", "qjl3", "turbo4", *suite("usual"), *of_budgets, "fp8"]
    rows = [row(name, 3 + i / 10, 0.1 + i / 100) for i, name in enumerate(dict.fromkeys(names))]
    rows.insert(0, replace(row("kitty2", 3.7, 0.2), options={"S": 0}))
    given, others = frontier.frontier(axes, rows, "kl")
    assert len(given) == 8
    assert len(others) == len(rows) - 8
    left = {r.label for r in rows} - {name.text for name in given}
    assert left == {"qjl3", "turbo4", "kitty2:S=0"}
    assert axes.get_title("right") == f"grey: {len(others)} more"
    shown = [line.get_color() for line in axes.get_lines() if line.get_marker() in ("o", "s")]
    assert shown.count(QUIET) == len(others)
    six, _ = frontier.frontier(axes, rows, "kl", 6)
    assert {name.text for name in six} == {"fp8", *of_budgets}


def test_few_points_all_have_names(axes: Any) -> None:
    rows = [row("turbo4", 4.5, 0.1), replace(row("kitty2", 3.7, 0.2), options={"S": 0, "W": 64})]
    names, others = frontier.frontier(axes, rows, "kl")
    assert [name.text for name in names] == ["turbo4", "kitty2:S=0, W=64"]
    assert others == []
    assert axes.get_title("right") == ""


def test_kivi_with_options_of_ours_is_ours() -> None:
    plain = row("kivi4", 5.5, 0.04)
    assert frontier.is_peer(plain)
    assert not frontier.is_peer(replace(plain, options={"key_scales": "fitted"}))


@pytest.mark.parametrize(
    ("less", "wanted"), [(True, [(3, 0.5), (4, 0.1)]), (False, [(3, 0.9), (5, 1.0)])], ids=["KL", "accuracy"]
)
def test_the_frontier(less: bool, wanted: list[tuple[float, float]]) -> None:
    points = [(4, 0.1), (3, 0.5), (3, 0.9), (5, 0.1), (5, 1.0), (5, 0.3)]
    assert frontier.best(points, less) == wanted


def test_intervals_reach_from_low_to_high() -> None:
    assert frontier.bars([Estimate(2.0, 1.5, 4.0), Estimate(1.0)]) == [[0.5, 0.0], [2.0, 0.0]]


def test_curves_stand_at_the_middle_of_their_bins_and_have_names(axes: Any) -> None:
    names = plots.curve(axes, ROWS[1:3], "kl", "position", lambda r: r.by_position)
    assert points(axes)["o"][:2] == [(256, 0.2), (768, pytest.approx(0.6))]
    assert [(name.text, name.at) for name in names] == [
        ("squat2", (768, pytest.approx(0.6))),
        ("squat4", (768, pytest.approx(0.06))),
    ]
    assert len({name.color for name in names}) == 2
    assert axes.get_xlabel() == "position"
    assert " ".join(axes.get_ylabel().split()) == METRICS["kl"]


def test_a_panel_has_no_more_curves_than_can_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["qjl3", "polar3", "innerq2", "kivi4", "fp8", "squat4", "kitty2", "squat2"]
    panels: list[Any] = []
    monkeypatch.setattr(plots, "_curves", lambda path, rows, *_: panels.append((path, rows)) or path)
    plots.draw_all([row(name, 3.0, 0.1) for name in names], tmp_path)
    assert {path.name.partition("-")[0] for path, _ in panels} == {"position", "depth"}
    for _, found in panels:
        assert [r.format for r in found] == ["qjl3", "polar3", "innerq2", "kivi4", "fp8", "kitty2"]


def test_every_plot_that_there_is_something_for(tmp_path: Path) -> None:
    failed = replace(row("qjl3", None, 0.1), metrics={}, by_position={}, by_depth={}, hurt=(), problem="refused")
    rows = [*ROWS, failed, row("squat2", None, 0.4, "recall", DECODING)]
    drawn = plots.draw_all(rows, tmp_path / "new")
    # without bits there is nothing to plot against
    wanted = {f"{kind}-{TEACHER_FORCED}-1024.png" for kind in ("frontier-kl", "frontier-accuracy")}
    panels = (f"{TEACHER_FORCED}-1024-text", f"{DECODING}-1024-recall")
    wanted |= {f"{kind}-{panel}.png" for kind in ("position-kl", "depth-accuracy") for panel in panels}
    assert {picture.path.name for picture in drawn} == wanted
    assert all(picture.path.read_bytes().startswith(PNG) for picture in drawn)
    assert plots.draw_all([ROWS[0], failed], tmp_path)[0].path.name == f"frontier-accuracy-{TEACHER_FORCED}-1024.png"


def test_the_heat_map_has_a_cell_for_each_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes as Real

    shown: list[Any] = []
    imshow = Real.imshow
    monkeypatch.setattr(
        Real, "imshow", lambda self, grid, **style: shown.append((grid, style)) or imshow(self, grid, **style)
    )
    errors = {
        "squat2": [HeadError(0, 0, 0.1, 0.5, 0.9), HeadError(0, 1, 0.2, 0.5, 0.9), HeadError(4, 1, 0.3, 0.5, 0.9)],
        "kivi2": [HeadError(0, 0, 0.4, 0.5, 0.9)],
    }
    picture = plots.heat_map(tmp_path / "heads.png", errors, "score", "scores")
    assert picture.path.read_bytes().startswith(PNG)
    (first, style), (second, other) = shown
    assert first[0] == [0.1, 0.2]
    assert math.isnan(first[1][0])
    assert first[1][1] == 0.3
    assert second[0][0] == 0.4
    # the same colors mean the same errors in both
    assert (style["vmin"], style["vmax"]) == (other["vmin"], other["vmax"]) == (0, 0.4)


def test_hurt_tokens_stand_in_their_text() -> None:
    (found,) = hurt_tables([ROWS[1], replace(ROWS[2], hurt=())], 1)
    assert "squat2, text, 1024 tokens, teacher-forced" in found.title
    ((text, *figures),) = found.rows
    assert "[cat] sat sat" in text
    assert "\\nb a\\nb [cat]" in text
    assert "\n" not in text
    assert len(text) < 80
    assert figures == ["77", "1.25", "0.900", "0.010"]
    assert hurt_tables(ROWS, 0) == []


def test_the_table_of_heads_names_the_worst() -> None:
    errors = {"squat2": [HeadError(0, 0, 0.1, 0.2, 0.3), HeadError(4, 1, 0.3, 0.4, 0.1)]}
    assert list(table(errors, "score").rows[0]) == ["squat2", "0.200", "0.300", "0.200", "layer 4, head 1: 0.300"]
    assert list(table(errors, "output").rows[0])[-1] == "layer 0, head 0: 0.300"


# -- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def results(tmp_path: Path) -> Path:
    Results(tuple(ROWS)).save(tmp_path / "results.json")
    return tmp_path / "results.json"


def test_show(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "show", str(results), "--hurt", "2", "--out", str(tmp_path / "plots")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the tokens that were hurt most") == len(ROWS)
    assert printed.count("x[y]z") == len(ROWS)
    listed = [Path(line) for line in printed.splitlines() if line.endswith((".png", "report.html"))]
    assert sorted(listed) == sorted((tmp_path / "plots").iterdir())
    assert cli.main(["eval", "show", str(results), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(ROWS)


def test_show_says_what_it_lacks(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (damaged := results.with_name("other.json")).write_text("{")
    assert cli.main(["eval", "show", str(damaged)]) == 1
    assert "can't be read as results" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["eval", "show", str(results), "--out", str(results.parent)]) == 1
    assert capsys.readouterr().err == "vllm-kvq eval show: plots need matplotlib: pip install 'vllm-kvq[bench]'\n"

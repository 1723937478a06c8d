"""Recorded evaluations, as docs/quality.md prints them: what a picture of quality against bits shows."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof.pictures.canvas import picture
from vllm_kvq.eval.choice import choices
from vllm_kvq.eval.results.frontier import MOST_NAMES, frontier
from vllm_kvq.eval.results.result import Estimate, Row
from vllm_kvq.formats.table import PLAIN
from vllm_kvq.naming import name_points

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "quality"


def rows(name: str, metric: str, task: str = "text") -> list[Row]:
    """One metric of all formats that a file has; the 16-bit cache has no error by definition."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["task"] == task and row["label"] != PLAIN]
    return [_row(row, metric) for row in found]


def _row(row: dict[str, str], metric: str) -> Row:
    (choice,) = choices(row["label"])
    value, low, high = (float(row[f"{metric}{end}"] or math.nan) for end in ("", "_low", "_high"))
    return Row(
        row["model"], choice.format, choice.options, row["task"], row["regime"], int(row["context"]),
        int(row["sequences"]), float(row["bits"]), metrics={metric: Estimate(value, low, high)},
    )  # fmt: skip


Panel = tuple[str, str, Sequence[Row]]
"""Its title, its metric, and what it shows."""


def draw(
    path: Path, data: Any, panels: Sequence[Panel], label: str, alike: bool = True, most: int = MOST_NAMES
) -> None:
    """Quality against bits in panels side by side, which share their scales if they are `alike`.

    `most`: how many points of a panel have names.
    """
    with picture(path, data, len(panels), (10.5, 3.9)) as places:
        named = []
        for axes, (title, metric, shown) in zip(places, panels, strict=True):
            names, others = frontier(axes, shown, metric, most)
            named.append((axes, names, others))
            axes.set_title(title, fontsize=9, loc="left")
        if alike:
            for ends in ("xlim", "ylim"):
                found = [end for axes in places for end in getattr(axes, f"get_{ends}")()]
                for axes in places:
                    getattr(axes, f"set_{ends}")(min(found), max(found))
        places[0].set_ylabel(label)
        for axes, names, others in named:
            name_points(axes, names, others)

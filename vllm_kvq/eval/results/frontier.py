"""Quality against bits in one pair of axes: a few formats with their names, all others in grey."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_kvq.eval.results.result import METRICS, Row
from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.methods import kivi
from vllm_kvq.formats.table import suite
from vllm_kvq.naming import OTHERS, OURS, QUIET, Name

DIVERGENCES = ("kl", "kl_forced", "kl_median", "kl_p999")
"""Metrics on logarithmic axes, for which less is better; for all others more is better."""
MOST_NAMES = 8
"""More of them in a pair of axes can't be read."""
WIDE = 24
"""Letters of a name per line."""
ABOUT = "circles: ours, with a line along the best of those named; squares: what other projects serve"
BITS = "bits per number, everything counted"


def is_peer(row: Row) -> bool:
    """Whether other projects serve this, and it is measured for comparison; KIVI with our options does not count."""
    name = row.format
    return name not in FORMATS or not FORMATS[name].public or (FORMATS[name] in kivi.FORMATS and not row.options)


def asked_for(name: str, options: bool = False) -> tuple[int, int]:
    """The lower, the more likely a user is to choose it: vLLM's own caches, formats of budgets, the usual ones, all
    others of ours, those with options, and last what other projects serve."""
    if name not in FORMATS:
        return (0, 0)
    if not FORMATS[name].public:
        return (5, 0)
    if options:
        return (4, 0)
    ranked = [*dict.fromkeys(fmt for budget in BUDGETS.values() for fmt in budget.formats), *suite("usual")]
    return (1, ranked.index(name)) if name in ranked else (3, 0)


def chosen(rows: Sequence[Row], most: int) -> list[Row]:
    """The rows that get a name, at most `most`, in their order."""
    first = sorted(range(len(rows)), key=lambda i: asked_for(rows[i].format, bool(rows[i].options)))[:most]
    return [rows[i] for i in sorted(first)]


def best(points: Iterable[tuple[float, float]], less_is_better: bool) -> list[tuple[float, float]]:
    """The (bits, value) pairs that no other pair beats with as few bits and a better value, sorted by bits."""
    sign = 1 if less_is_better else -1
    kept: list[tuple[float, float]] = []
    for bits, value in sorted(points, key=lambda p: (p[0], sign * p[1])):
        if not kept or sign * value < sign * kept[-1][1]:
            kept.append((bits, value))
    return kept


def frontier(
    axes: Any, rows: Sequence[Row], metric: str, most: int = MOST_NAMES
) -> tuple[list[Name], list[tuple[float, float]]]:
    """Draws a point for each row, at most `most` of them with names, and the line along ours that have one.

    Returns the names, for `name_points`, and the points that have none.
    """
    named, less = chosen(rows, most), metric in DIVERGENCES
    if ours := [(row.bits or 0.0, row.metrics[metric].value) for row in named if not is_peer(row)]:
        axes.plot(*zip(*best(ours, less), strict=True), "-", color=OURS, linewidth=1)
    names, others = [], []
    for row in rows:
        found, peer, at = row.metrics[metric], is_peer(row), (row.bits or 0.0, row.metrics[metric].value)
        color = QUIET if row not in named else OTHERS if peer else OURS
        size, alpha = (4.5, 1.0) if row in named else (3.0, 0.7)
        axes.errorbar(*at, yerr=bars([found]), fmt="s" if peer else "o", color=color, capsize=2, markersize=size,
                      linewidth=1, alpha=alpha)  # fmt: skip
        if row in named:
            text = textwrap.fill(row.label.replace(",", ", "), WIDE, break_on_hyphens=False)
            names.append(Name(text, at, color, found.low, found.high))
        else:
            others.append(at)
    axes.set_xlabel(BITS)
    axes.margins(x=0.2, y=0.1)
    if less:
        axes.set_yscale("log")
    if others:
        axes.set_title(f"grey: {len(others)} more", fontsize=8, color=QUIET, loc="right")
    return names, others


def bars(estimates: Sequence[Any]) -> list[list[float]]:
    """Distances to both ends of the intervals, 0 where there is none."""
    below = [0.0 if math.isnan(e.low) else max(0.0, e.value - e.low) for e in estimates]
    above = [0.0 if math.isnan(e.high) else max(0.0, e.high - e.value) for e in estimates]
    return [below, above]


def unit(metric: str) -> str:
    """The label of an axis."""
    return textwrap.fill(METRICS[metric], 48, break_on_hyphens=False)

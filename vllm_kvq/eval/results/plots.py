"""Results as PNG files: quality against bits, by depth, by position; heads' errors as a heat map. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kvq.drawing import Picture, pyplot, save
from vllm_kvq.eval.heads.heads import HeadError
from vllm_kvq.eval.results.frontier import (
    ABOUT,
    DIVERGENCES,
    MOST_NAMES,
    asked_for,
    bars,
    chosen,
    frontier,
    is_peer,
    unit,
)
from vllm_kvq.eval.results.report import HEADS
from vllm_kvq.eval.results.result import Curve, Row
from vllm_kvq.formats.table import PLAIN
from vllm_kvq.naming import OURS, QUIET, Name, name_curves, name_points

AGAINST_BITS = ("kl", "kl_p999", "accuracy", "exact", "score")
NAMES = {**HEADS, "top1": "Same top 1", "accuracy": "Right answers", "exact": "Exact answers"}
"""Metrics as titles have them. Axes show shares where tables show percentages."""
Panels = Mapping[str, Sequence[Row]]
"""The rows in one pair of axes, by its title."""
MOST_CURVES = 6
"""More of them in a panel can't be told apart."""


def draw_all(rows: Iterable[Row], folder: Path) -> list[Picture]:
    """Every plot for which the rows have data."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for (regime, context), same in _grouped(rows, lambda row: (row.regime, row.context)).items():
        for metric in AGAINST_BITS:
            shown = [row for row in same if row.bits is not None and _has(row, metric, row.metrics)]
            path = folder / f"frontier-{metric}-{regime}-{context}.png"
            title = f"{NAMES[metric]} against bits: {regime}, {context} tokens\n{ABOUT}"
            drawn += [_frontiers(path, _grouped(shown, lambda row: row.task), metric, title)] if shown else []
    for (regime, context, task), same in _grouped(rows, lambda row: (row.regime, row.context, row.task)).items():
        for kind, label, curves in CURVES:
            for metric in NAMES:
                path = folder / f"{kind}-{metric}-{regime}-{context}-{task}.png"
                shown = [row for row in same if _has(row, metric, curves(row))]
                few = chosen(shown, MOST_CURVES)
                some = f" ({len(few)} of {len(shown)} formats)" if few != shown else ""
                title = f"{NAMES[metric]} by {kind}: {regime}, {context} tokens, {task}{some}"
                drawn += [_curves(path, few, metric, label, curves, title)] if few else []
    return drawn


CURVES: tuple[tuple[str, str, Callable[[Row], Mapping[str, Curve]]], ...] = (
    ("position", "position, tokens", lambda row: row.by_position),
    ("depth", "how far back the source is, share of the text (1: at the beginning)", lambda row: row.by_depth),
    ("steps", "steps of work in the answer", lambda row: row.by_steps),
)
"""File name, label of the axis, and the attribute of a row."""


def _has(row: Row, metric: str, figures: Mapping[str, Any]) -> bool:
    """Whether there is a figure, and not only the 16-bit cache's difference from itself, which is 0 by definition."""
    return metric in figures and not (row.format == PLAIN and metric in DIVERGENCES)


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def curve(
    axes: Any, rows: Sequence[Row], metric: str, x_label: str, curves: Callable[[Row], Mapping[str, Curve]]
) -> list[Name]:
    """Draws a curve for each row, and returns the names for their ends."""
    names = []
    for i, row in enumerate(rows):
        bins = curves(row)[metric]
        x, y = [(b.begin + b.end) / 2 for b in bins], [b.estimate.value for b in bins]
        style, color = "s:" if is_peer(row) else "o-", f"C{i}"
        axes.errorbar(x, y, yerr=bars([b.estimate for b in bins]), fmt=style, capsize=2, markersize=3, color=color)
        names.append(Name(row.label.replace(",", ", "), (x[-1], y[-1]), color))
    axes.set_xlabel(x_label)
    axes.set_ylabel(unit(metric))
    if metric in DIVERGENCES:
        axes.set_yscale("log")
    return names


# -- whole figures ----------------------------------------------------------------------------------------------------
def _frontiers(path: Path, panels: Panels, metric: str, title: str) -> Picture:
    """A file with a pair of axes for each task."""
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    size = (max(7.0, 4.8 * columns), 4.2 * lines + 0.4)
    figure, axes = pyplot().subplots(lines, columns, figsize=size, dpi=120, squeeze=False, layout="constrained")
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    named = []
    for place, (task, rows) in zip(axes.flat, panels.items(), strict=False):
        named.append((place, *frontier(place, rows, metric)))
        place.set_title(task, fontsize=9)
        place.grid(True, which="both", alpha=0.25)
    for place in axes[:, 0]:
        place.set_ylabel(unit(metric))
    figure.suptitle(title, fontsize=10)
    for place, names, others in named:
        name_points(place, names, others)
    return save(figure, path, title)


def _curves(
    path: Path,
    rows: Sequence[Row],
    metric: str,
    x_label: str,
    curves: Callable[[Row], Mapping[str, Curve]],
    title: str,
) -> Picture:
    figure, axes = pyplot().subplots(figsize=(7.4, 4.4), dpi=120, layout="constrained")
    names = curve(axes, rows, metric, x_label, curves)
    axes.grid(True, which="both", alpha=0.25)
    figure.suptitle(title, fontsize=10)
    name_curves(axes, names)
    return save(figure, path, title)


def heat_map(path: Path, errors: Mapping[str, Sequence[HeadError]], measure: str, title: str) -> Picture:
    """A panel for each format, all with the same colors: KV heads to the right, layers downwards."""
    plt = pyplot()
    largest = max(getattr(e, measure) for found in errors.values() for e in found)
    layers = sorted({e.layer for found in errors.values() for e in found})
    heads = 1 + max(e.head for found in errors.values() for e in found)
    size = (1.2 + len(errors) * (0.9 + 0.35 * heads), 1.6 + 0.3 * len(layers))
    figure, axes = plt.subplots(1, len(errors), figsize=size, dpi=120, squeeze=False, layout="constrained")
    for place, (label, found) in zip(axes.flat, errors.items(), strict=True):
        grid = [[math.nan] * heads for _ in layers]
        for e in found:
            grid[layers.index(e.layer)][e.head] = getattr(e, measure)
        image = place.imshow(grid, vmin=0, vmax=largest, cmap="magma_r", aspect="auto")
        place.set_title(label, fontsize=8)
        place.set_xticks(range(heads))
        place.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        place.set_xlabel("KV head")
    axes.flat[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(axes.flat), label="relative error")
    return save(figure, path, title)


def by_context(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], title: str, label: str) -> Picture:
    """A line for each format against the tokens of a request; those beyond what can be told apart are grey."""
    figure, axes = pyplot().subplots(figsize=(8, 5), dpi=120, layout="constrained")
    ranked = sorted(curves, key=lambda name: asked_for(name.partition(":")[0], ":" in name))
    named, names = ranked[:MOST_NAMES], []
    for name, points in curves.items():
        color = OURS if name in named else QUIET
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, linewidth=1.2 if name in named else 0.6)
        if name in named:
            names.append(Name(name.replace(",", ", "), points[-1], color))
    if rest := len(curves) - len(named):
        axes.set_title(f"grey: {rest} more", fontsize=8, color=QUIET, loc="right")
    contexts = sorted({context for points in curves.values() for context, _ in points})
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c // 1024}k" if c % 1024 == 0 else str(c) for c in contexts])
    axes.set_xlabel("tokens of a request")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.25)
    figure.suptitle(title, fontsize=10)
    name_curves(axes, [*names, Name("bf16", (contexts[-1], 1), "black")])
    return save(figure, path, title)

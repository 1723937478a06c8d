"""Results as PNG files: quality against bits, by depth, by position; heads' errors as a heat map. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kvq.drawing import Picture, pyplot, save
from vllm_kvq.eval.heads.heads import HeadError
from vllm_kvq.eval.results.report import HEADS
from vllm_kvq.eval.results.result import METRICS, Curve, Row
from vllm_kvq.formats import FORMATS

DIVERGENCES = ("kl", "kl_forced", "kl_median", "kl_p999")
"""Metrics on logarithmic axes, for which less is better; for all others more is better."""
AGAINST_BITS = ("kl", "kl_p999", "accuracy", "exact", "score")
NAMES = {**HEADS, "top1": "Same top 1", "accuracy": "Right answers", "exact": "Exact answers"}
"""Metrics as titles have them. Axes show shares where tables show percentages."""
PLAIN = "auto"
Panels = Mapping[str, Sequence[Row]]
"""The rows in one pair of axes, by its title."""
Onto = Callable[[Any, Sequence[Row], Mapping[str, int]], None]
"""Draws rows onto a pair of axes; each label has its number in the figure's legend."""


def is_peer(row: Row) -> bool:
    """Whether other projects serve this, and it is measured for comparison; KIVI with our options does not count."""
    name = row.format
    return name not in FORMATS or not FORMATS[name].public or (name.startswith("kivi") and not row.options)


def draw_all(rows: Iterable[Row], folder: Path) -> list[Picture]:
    """Every plot for which the rows have data."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for (regime, context), same in _grouped(rows, lambda row: (row.regime, row.context)).items():

        def draw(kind: str, metric: str, has: Callable[[Row], Mapping[str, Any]], onto: Onto) -> list[Picture]:
            path = folder / f"{kind}-{metric}-{regime}-{context}.png"  # noqa: B023
            title = f"{NAMES[metric]} against bits: {regime}, {context} tokens\n{METRICS[metric]}"  # noqa: B023
            shown = [row for row in same if metric in has(row) and not _is_zero_by_definition(row, metric)]  # noqa: B023
            return _figure(path, _grouped(shown, lambda row: row.task), onto, title) if shown else []

        for metric in AGAINST_BITS:
            drawn += draw("frontier", metric, lambda row: {} if row.bits is None else row.metrics, frontier(metric))
    for (regime, context, task), same in _grouped(rows, lambda row: (row.regime, row.context, row.task)).items():
        for kind, label, curves in CURVES:
            for metric in NAMES:
                path = folder / f"{kind}-{metric}-{regime}-{context}-{task}.png"
                shown = [row for row in same if metric in curves(row) and not _is_zero_by_definition(row, metric)]
                few = first_of(shown)
                some = f" ({len(few)} of {len(shown)} formats)" if few != shown else ""
                title = f"{NAMES[metric]} by {kind}: {regime}, {context} tokens, {task}{some}"
                drawn += _figure(path, {"": few}, curve(metric, label, curves), title) if few else []
    return drawn


MOST_CURVES = 6
"""More of them in a panel can't be told apart."""


def first_of(rows: Sequence[Row]) -> list[Row]:
    """As many as a panel takes, in their order: first vLLM's own caches and the usual formats."""

    def rank(row: Row) -> tuple[int, int]:
        if row.format not in FORMATS:
            return (0, 0)
        usual = None if row.options else FORMATS[row.format].usual
        return (2, 0) if usual is None else (1, usual)

    chosen = sorted(rows, key=rank)[:MOST_CURVES]
    return [row for row in rows if row in chosen]


CURVES: tuple[tuple[str, str, Callable[[Row], Mapping[str, Curve]]], ...] = (
    ("position", "position, tokens", lambda row: row.by_position),
    ("depth", "how far back the source stands (1: at the beginning)", lambda row: row.by_depth),
    ("steps", "steps of work in the answer", lambda row: row.by_steps),
)
"""File name, label of the axis, and the attribute of a row."""


def _is_zero_by_definition(row: Row, metric: str) -> bool:
    """The difference of the 16-bit cache from itself."""
    return row.format == PLAIN and metric in DIVERGENCES


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


# -- one pair of axes -------------------------------------------------------------------------------------------------
def best(points: Iterable[tuple[float, float]], less_is_better: bool) -> list[tuple[float, float]]:
    """The (bits, value) pairs that no other pair beats with as few bits and a better value, by bits."""
    sign = 1 if less_is_better else -1
    kept: list[tuple[float, float]] = []
    for bits, value in sorted(points, key=lambda p: (p[0], sign * p[1])):
        if not kept or sign * value < sign * kept[-1][1]:
            kept.append((bits, value))
    return kept


def frontier(metric: str) -> Onto:
    """One line along our best formats; each row is a point with interval and number, peers with another marker."""

    def onto(axes: Any, rows: Sequence[Row], numbers: Mapping[str, int]) -> None:
        less = metric in DIVERGENCES
        ours = [(row.bits or 0.0, row.metrics[metric].value) for row in rows if not is_peer(row)]
        if ours:
            axes.plot(*zip(*best(ours, less), strict=True), "-", color="tab:blue")
        for row in rows:
            found, peer = row.metrics[metric], is_peer(row)
            style = {"fmt": "s" if peer else "o", "color": "tab:orange" if peer else "tab:blue"}
            name = _numbered(row.label, numbers)
            axes.errorbar(row.bits, found.value, yerr=_bars([found]), capsize=2, markersize=4, label=name, **style)
            axes.annotate(
                numbers[row.label], (row.bits, found.value), (4, 4), textcoords="offset points", fontsize=8, zorder=5
            )
        axes.set_xlabel("bits per element, everything counted")
        if less:
            axes.set_yscale("log")

    return onto


def curve(metric: str, x_label: str, curves: Callable[[Row], Mapping[str, Curve]]) -> Onto:
    def onto(axes: Any, rows: Sequence[Row], numbers: Mapping[str, int]) -> None:
        for row in rows:
            bins = curves(row)[metric]
            x = [(b.begin + b.end) / 2 for b in bins]
            estimates = [b.estimate for b in bins]
            style = "s:" if is_peer(row) else "o-"
            y = [e.value for e in estimates]
            name = _numbered(row.label, numbers)
            color = f"C{numbers[row.label] - 1}"
            axes.errorbar(x, y, yerr=_bars(estimates), fmt=style, capsize=2, markersize=3, label=name, color=color)
        axes.set_xlabel(x_label)
        axes.set_ylabel(textwrap.fill(METRICS[metric], 48, break_on_hyphens=False))
        if metric in DIVERGENCES:
            axes.set_yscale("log")

    return onto


def _numbered(label: str, numbers: Mapping[str, int]) -> str:
    return textwrap.fill(f"{numbers[label]}  {label.replace(',', ', ')}", 34, subsequent_indent="    ")


def _bars(estimates: Sequence[Any]) -> list[list[float]]:
    """Distances to both ends of the intervals, 0 where there is none."""
    below = [0.0 if math.isnan(e.low) else max(0.0, e.value - e.low) for e in estimates]
    above = [0.0 if math.isnan(e.high) else max(0.0, e.high - e.value) for e in estimates]
    return [below, above]


# -- whole figures ----------------------------------------------------------------------------------------------------
def _figure(path: Path, panels: Panels, onto: Onto, title: str) -> list[Picture]:
    """A file with a pair of axes for each task, and one legend for all of them."""
    plt = pyplot()
    labels = dict.fromkeys(row.label for rows in panels.values() for row in rows)
    numbers = {label: n for n, label in enumerate(labels, 1)}
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    size = (4.8 * columns + 2.6, max(4.2 * lines, 1 + 0.2 * len(numbers)))
    figure, axes = plt.subplots(lines, columns, figsize=size, dpi=120, squeeze=False, layout="constrained")
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    for place, (name, rows) in zip(axes.flat, panels.items(), strict=False):
        onto(place, rows, numbers)
        place.set_title(name, fontsize=9)
        place.grid(True, which="both", alpha=0.25)
    drawn = (zip(*place.get_legend_handles_labels(), strict=True) for place in axes.flat)
    handles = {name: handle for pairs in drawn for handle, name in pairs}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=7, frameon=False)
    return [save(figure, path, title)]


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
    """A line for each format against the tokens of a request; the legend has the order of the lines' ends."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    for i, (name, points) in enumerate(sorted(curves.items(), key=lambda item: -item[1][-1][1])):
        axes.plot(*zip(*points, strict=True), "o-" if i % 2 else "s--", markersize=3, label=name)
    contexts = sorted({context for points in curves.values() for context, _ in points})
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c // 1024}k" if c % 1024 == 0 else str(c) for c in contexts])
    axes.set_xlabel("tokens of a request")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return save(figure, path, title)

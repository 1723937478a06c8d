"""The rows of a measurement as CSV, and as a plot: curves against context, or bars where there is one context."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_kvq.drawing import Picture, name_ends, pyplot, save
from vllm_kvq.formats.table import suite
from vllm_kvq.naming import OTHERS, OURS, QUIET, Name, name_points

if TYPE_CHECKING:
    from vllm_kvq.bench.steps import Shape
    from vllm_kvq.bench.timing import Row

Measured: TypeAlias = "list[tuple[Shape, list[Row]]]"
Curves = dict[str, list[tuple[int, float]]]
"""Name -> (context, figure)."""
STYLES = {"bf16": "--o", "fp8": ":o"}
"""The caches that store 16 or 8 bits; they are black."""
MOST_CURVES = 8
"""More of them in a panel can't be told apart."""
IN_FLIGHT, OUTPUT = "requests in flight", "output tokens per second"


def records(measured: Measured, threads: int, isa: str) -> list[dict[str, Any]]:
    """One row per candidate and shape."""
    return [
        {
            **{"kernel": row.name, **vars(shape), "threads": threads, "isa": isa},
            **{"ms": round(row.ms, 4), "best_ms": round(row.best, 4), "bytes": row.nbytes},
            **{"gb_per_s": round(row.gb_per_s, 2), "times_the_copy": round(row.floor, 2)},
            **{f"x_{base}": round(ratio, 3) for base, ratio in row.ratio.items()},
            **{f"limit_{base}": round(ratio, 3) for base, ratio in row.limit.items()},
        }
        for shape, rows in measured
        for row in rows
    ]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def few(names: Iterable[str]) -> list[str]:
    """As many as a panel takes, in their order: first vLLM's own caches and the usual formats."""
    first = [*STYLES, *suite("usual")]
    known = [*names]
    kept = sorted(known, key=lambda name: first.index(name) if name in first else len(first))[:MOST_CURVES]
    return [name for name in known if name in kept]


# -- plots ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scale:
    """What an axis shows."""

    label: str
    """With its unit."""
    digits: str = ".2f"
    """How a bar's figure is written."""
    base: str | None = None
    """The baseline drawn at 1, if any."""
    log: bool = False


MILLISECONDS = Scale("ms per decode step and layer", ".3g", log=True)


def times(base: str, what: str = "") -> Scale:
    return Scale(f"{what} times as fast as {base}".strip(), base=base)


def plot(path: Path, measured: Measured, title: str) -> Picture:
    """Milliseconds per decode step and layer against context."""
    curves: Curves = {}
    for shape, rows in measured:
        for row in rows:
            curves.setdefault(row.name, []).append((shape.context, row.ms))
    return draw(path, {"": curves}, title, MILLISECONDS)


def draw(path: Path, panels: Mapping[str, Curves], title: str, scale: Scale) -> Picture:
    """Panels below each other, each with its title: curves against context, or bars where it has a single context."""
    high = [1 + 0.24 * len(curves) if is_bars(curves) else 4.2 for curves in panels.values()]
    figure, column = pyplot().subplots(
        len(panels),
        figsize=(8, sum(high) + 0.6),
        dpi=120,
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": high},
    )
    cut = 0
    for (axes,), (above, curves) in zip(column, panels.items(), strict=True):
        if is_bars(curves):
            (context,) = _contexts(curves)
            axes.set_title(
                ", ".join([above] * bool(above) + [f"{context:,} tokens in the cache"]), fontsize=9, loc="left"
            )
            _bars(axes, curves, scale)
            continue
        axes.set_title(above, fontsize=9, loc="left")
        shown = few(curves)
        cut = max(cut, len(curves) if len(shown) < len(curves) else 0)
        _lines(axes, {name: sorted(curves[name]) for name in shown}, scale)
    if cut:
        mark = ";" if "\n" in title else ""  # lines after the first may become one
        title += f"{mark}\n{MOST_CURVES} of {cut} are drawn: vLLM's own caches and the usual formats first"
    return save(figure, path, title)


def points(axes: Any, found: Mapping[str, tuple[float, float]], across: str, up: str) -> None:
    """A point for each name, on axes from zero; as many as a panel takes have their names next to them."""
    shown = few(found)
    names = [Name(name, found[name], OTHERS if name in STYLES else OURS) for name in shown]
    others = [at for name, at in found.items() if name not in shown]
    for name in names:
        axes.plot(*name.at, "s" if name.text in STYLES else "o", color=name.color, markersize=5)
    for at in others:
        axes.plot(*at, "o", color=QUIET, markersize=3)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(True, alpha=0.25)
    axes.margins(0.3)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    name_points(axes, names, others)


def is_bars(curves: Curves) -> bool:
    return len(_contexts(curves)) == 1


def _contexts(curves: Curves) -> list[int]:
    return sorted({context for points in curves.values() for context, _ in points})


def _colors(names: Iterable[str]) -> dict[str, str]:
    names = [*names]
    ours = [name for name in names if name not in STYLES]
    return {name: "black" if name in STYLES else f"C{ours.index(name) % 10}" for name in names}


def _lines(axes: Any, curves: Curves, scale: Scale) -> None:
    colors = _colors(curves)
    contexts = _contexts(curves)
    for name, points in curves.items():
        style = STYLES.get(name, "-o")
        axes.plot(*zip(*points, strict=True), style, color=colors[name], markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c // 1024}k" if c % 1024 == 0 else str(c) for c in contexts])
    axes.set_xlabel("tokens in the cache, per request")
    axes.set_ylabel(scale.label)
    axes.grid(True, which="both", alpha=0.25)
    ends = {name: points[-1] for name, points in curves.items()}
    if scale.base:
        axes.axhline(1, color="black", linewidth=0.8)
        ends[scale.base], colors[scale.base] = (contexts[-1], 1.0), "black"
    if scale.log:
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylim(bottom=0)  # last, because what is drawn later does not move the limits
    name_ends(axes, ends, colors)


def _bars(axes: Any, curves: Curves, scale: Scale) -> None:
    """The first one is at the top. A bar has its figure at its end."""
    values = {name: points[0][1] for name, points in curves.items()}
    colors = ["0.55" if name in STYLES else "C0" for name in values]
    drawn = axes.barh([*values], [*values.values()], height=0.65, color=colors)
    axes.bar_label(drawn, [f"{value:{scale.digits}}" for value in values.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(scale.label)
    axes.grid(True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    if scale.base:
        axes.axvline(1, color="black", linewidth=0.8)
        axes.annotate(scale.base, (1, 1), (0, 2), ("data", "axes fraction"), "offset points", ha="center", fontsize=8)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)  # last, because what is drawn later does not move the limits

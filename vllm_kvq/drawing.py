"""A figure as a file, and as SVG that a page shows in its own colours; names next to points and curves. Needs
matplotlib."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SVG = {"svg.fonttype": "none", "svg.hashsalt": "vllm_kvq"}
"""Letters stay letters, and the same figure gives the same text."""
OURS, OTHERS, QUIET = "#1f5fa8", "#c2571a", "#8a8f98"
"""The colours of our formats, of what others serve, and of what has no name in a picture."""


@dataclass(frozen=True)
class Picture:
    path: Path
    title: str
    svg: str
    """The same without its title, for whoever has headings; what is black there has the text's colour."""


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'vllm-kvq[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def save(figure: Any, path: Path, title: str) -> Picture:
    """Writes the file, whose ending says its kind, and closes the figure."""
    above = figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    above.set_text("")
    text = io.StringIO()
    plt = pyplot()
    with plt.rc_context(SVG):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    return Picture(path, title, text.getvalue().replace("#000000", "currentColor"))


# -- names in a picture instead of a legend ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Name:
    """Of a point, or of a curve, which then ends at that point."""

    text: str
    at: tuple[float, float]
    color: str
    low: float | None = None
    high: float | None = None
    """The ends of the point's interval."""


SIZE = 8.5
"""Of a name's letters, in points."""
Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""


def name_points(axes: Any, names: Sequence[Name], others: Sequence[tuple[float, float]] = ()) -> None:
    """Writes each name where it hides as little as possible: other names, points, intervals, lines.

    Call it when everything else is drawn. `others` are points without a name.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # the layout is then final
    scale = figure.dpi / 72
    extent, edge = axes.get_window_extent(), 4 * scale
    frame = (extent.x0 + edge, extent.y0 + edge, extent.x1 - edge, extent.y1 - edge)
    points = [axes.transData.transform(at) for at in (*(name.at for name in names), *others)]
    taken = [_around(x, y, 4 * scale) for x, y in points]
    for name in names:
        if name.low is not None and name.high is not None:
            (x, low), (_, high) = (axes.transData.transform((name.at[0], y)) for y in (name.low, name.high))
            taken.append((x - scale, low, x + scale, high))
    taken += _along_lines(axes, 2 * scale)
    written: list[Box] = []
    for name in sorted(names, key=lambda name: (-name.at[1], name.at[0])):
        width, height = _size(axes, name.text)
        x, y = axes.transData.transform(name.at)

        def cost(place: tuple[float, float], x: float = x, y: float = y, w: float = width, h: float = height) -> float:
            box = _box(x + place[0] * scale, y + place[1] * scale, w, h, place[0])
            inside = _common(box, frame)
            hidden = 5 * sum(_common(box, other) for other in written) + 2 * sum(_common(box, o) for o in taken)
            return hidden + 5 * (w * h - inside) + 0.2 * scale * scale * (abs(place[0]) + 2 * abs(place[1]))

        place = min(_places(), key=cost)
        written.append(_box(x + place[0] * scale, y + place[1] * scale, width, height, place[0]))
        _write(axes, name, place).set_in_layout(False)


def name_ends(axes: Any, names: Sequence[Name]) -> None:
    """Writes each curve's name to the right of its end, one below the other. Call it when everything else is drawn."""
    figure, scale = axes.figure, axes.figure.dpi / 72
    if not names:
        return
    texts = [_write(axes, name, (7, 0)) for name in names]
    figure.draw_without_rendering()  # the layout has now made room for them
    height = max(_size(axes, name.text)[1] for name in names)
    wanted = [float(axes.transData.transform(name.at)[1]) for name in names]
    order = sorted(range(len(names)), key=lambda i: wanted[i])
    for i, y in zip(order, spread([wanted[i] for i in order], 1.05 * height), strict=True):
        texts[i].set_position((7, (y - wanted[i]) / scale))


def spread(wanted: Sequence[float], apart: float) -> list[float]:
    """Places in the same order, each at least `apart` from the next, as near to the wanted ones as possible."""
    groups: list[tuple[float, int]] = []
    """Mean and number of those that touch, each without what those below push it up."""
    for i, y in enumerate(wanted):
        mean, count = y - i * apart, 1
        while groups and groups[-1][0] > mean:
            other, more = groups.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        groups.append((mean, count))
    means = itertools.chain.from_iterable([mean] * count for mean, count in groups)
    return [mean + i * apart for i, mean in enumerate(means)]


def _write(axes: Any, name: Name, place: tuple[float, float]) -> Any:
    side = "left" if place[0] > 0 else "right" if place[0] < 0 else "center"
    arrow = {"arrowstyle": "-", "color": name.color, "linewidth": 0.5} if max(map(abs, place)) > 12 else None
    return axes.annotate(
        name.text, name.at, place, textcoords="offset points", color=name.color, fontsize=SIZE, ha=side, va="center",
        annotation_clip=False, arrowprops=arrow,
    )  # fmt: skip


def _places() -> Iterator[tuple[float, float]]:
    """Offsets in points, the usual one first."""
    for far in (7, 11, 16, 24):
        yield from ((far, 0), (-far, 0), (far, far - 2), (far, 2 - far), (-far, far - 2), (-far, 2 - far))
        yield from ((0, far + 3), (0, -far - 3), (far / 2 + 2, far + 3), (far / 2 + 2, -far - 3))


def _size(axes: Any, text: str) -> tuple[float, float]:
    """Width and height in pixels."""
    written = axes.text(0, 0, text, fontsize=SIZE)
    extent = written.get_window_extent(axes.figure.canvas.get_renderer())
    written.remove()
    return float(extent.width), float(extent.height)


def _box(x: float, y: float, width: float, height: float, side: float) -> Box:
    left = x if side > 0 else x - width if side < 0 else x - width / 2
    return left, y - height / 2, left + width, y + height / 2


def _around(x: float, y: float, far: float) -> Box:
    return x - far, y - far, x + far, y + far


def _along_lines(axes: Any, far: float) -> Iterator[Box]:
    """Boxes along what is drawn as a line."""
    for line in axes.get_lines():
        if line.get_linestyle() != "None":
            for (x0, y0), (x1, y1) in itertools.pairwise(axes.transData.transform(line.get_xydata())):
                steps = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / (2 * far)))
                for i in range(steps + 1):
                    yield _around(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps, far)


def _common(a: Box, b: Box) -> float:
    """The area of what two boxes share."""
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, wide) * max(0.0, high)

"""Names next to points and curves, instead of a legend: where they hide as little as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvq.drawing import name_ends

OURS, OTHERS, QUIET = "#1f5fa8", "#c2571a", "#767c86"
"""The colours of our formats, of what others serve, and of what has no name in a picture."""


@dataclass(frozen=True)
class Name:
    """The name of a point, or of a curve, which then ends at that point."""

    text: str
    at: tuple[float, float]
    color: str
    low: float = math.nan
    high: float = math.nan
    """The ends of the point's interval, if it has one."""


SIZE = 8.5
"""The size of a name's letters, in points."""
Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""


def name_points(axes: Any, names: Sequence[Name], others: Sequence[tuple[float, float]] = ()) -> None:
    """Writes each name where it hides as little as possible (other names, points, intervals, lines), and nearer to its
    own point than to any other one that has a name.

    Call it when everything else is drawn. `others` are points without a name.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # the layout is then final
    scale = figure.dpi / 72
    extent, edge = axes.get_window_extent(), 4 * scale
    frame = (extent.x0 + edge, extent.y0 + edge, extent.x1 - edge, extent.y1 - edge)
    points = [axes.transData.transform(name.at) for name in names]
    taken = [_around(x, y, 4 * scale) for x, y in (*points, *map(axes.transData.transform, others))]
    taken += _intervals(axes, names, scale)
    taken += _along_lines(axes, 2 * scale)
    sizes = [_size(axes, name.text) for name in names]
    places = [next(_places())] * len(names)
    written: dict[int, Box] = {}

    def box(i: int, place: tuple[float, float]) -> Box:
        (x, y), (width, height) = points[i], sizes[i]
        return _box(x + place[0] * scale, y + place[1] * scale, width, height, place[0])

    def cost(i: int, place: tuple[float, float]) -> float:
        """In square pixels."""
        there = box(i, place)
        hidden = 5 * sum(_common(there, other) for j, other in written.items() if j != i)
        hidden += 2 * sum(_common(there, other) for other in taken)
        outside = sizes[i][0] * sizes[i][1] - _common(there, frame)
        own = _far(there, *points[i])
        doubtful = sum(_far(there, *point) <= own for j, point in enumerate(points) if j != i)
        way = abs(place[0]) + 2 * abs(place[1])
        return hidden + 5 * outside + scale * scale * (60 * doubtful + 0.4 * way)

    order = sorted(range(len(names)), key=lambda i: (-names[i].at[1], names[i].at[0]))
    for i in 2 * order:  # the second time, all others have a place
        places[i] = min(_places(), key=lambda place: cost(i, place))
        written[i] = box(i, places[i])
    for name, place in zip(names, places, strict=True):
        _write(axes, name, place).set_in_layout(False)


def name_curves(axes: Any, names: Sequence[Name]) -> None:
    """Writes each name at the right of its curve's end. Call it when everything else is drawn."""
    axes.figure.draw_without_rendering()
    name_ends(axes, {name.text: name.at for name in names}, {name.text: name.color for name in names}, SIZE)


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


def _intervals(axes: Any, names: Sequence[Name], far: float) -> Iterator[Box]:
    for name in names:
        if math.isfinite(name.low) and math.isfinite(name.high):
            (x, low), (_, high) = (axes.transData.transform((name.at[0], y)) for y in (name.low, name.high))
            yield x - far, low, x + far, high


def _far(box: Box, x: float, y: float) -> float:
    """From a point to a box."""
    return math.hypot(max(box[0] - x, 0, x - box[2]), max(box[1] - y, 0, y - box[3]))


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

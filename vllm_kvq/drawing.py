"""A figure as a file, and as SVG that a page shows in its own colours. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SVG = {"svg.fonttype": "none", "svg.hashsalt": "vllm_kvq"}
"""Letters stay letters, and the same figure gives the same text."""


@dataclass(frozen=True)
class Picture:
    path: Path
    title: str
    svg: str
    """The same without its title, for pages that have headings; what is black there has the text's colour."""


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'vllm-kvq[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def save(figure: Any, path: Path, title: str) -> Picture:
    """Writes the file, whose suffix says its kind, and closes the figure."""
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


def name_ends(axes: Any, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str], size: float = 8) -> None:
    """Writes each curve's name to the right of its last point, moved up or down until it covers no other name.

    The axes must have their limits, scales and height.
    """
    high = axes.figure.get_size_inches()[1] * axes.get_position().height
    step = 1.25 * size / 72 / high
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = {name: float(to_axes.transform(end)[1]) for name, end in ends.items()}
    for name, y in zip(sorted(wanted, key=wanted.__getitem__), apart(sorted(wanted.values()), step), strict=True):
        axes.annotate(
            name,
            ends[name],
            (1.03, y),
            textcoords="axes fraction",
            va="center",
            fontsize=size,
            color=colors[name],
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": colors[name], "shrinkA": 0, "shrinkB": 2},
        )


def apart(wanted: Sequence[float], step: float) -> list[float]:
    """Ascending places at least `step` apart; those that are too near share the room around their middle."""
    groups: list[list[float]] = []
    for place in wanted:
        groups.append([place])
        while len(groups) > 1 and _places(groups[-2], step)[-1] + step > _places(groups[-1], step)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [place for group in groups for place in _places(group, step)]


def _places(group: Sequence[float], step: float) -> list[float]:
    first = sum(group) / len(group) - step * (len(group) - 1) / 2
    return [first + i * step for i in range(len(group))]

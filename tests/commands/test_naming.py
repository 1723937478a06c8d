"""Names next to points and curves: none hides another one, and each stands near what it names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from vllm_kvq.drawing import pyplot, save
from vllm_kvq.naming import Name, name_curves, name_points

CROWD = [Name(f"format{i}", (3 + 0.04 * (i % 3), 0.1 * 1.03**i), "black", 0.09, 0.12) for i in range(8)]


@pytest.fixture
def axes() -> Iterator[Any]:
    plt = pyplot()
    figure, made = plt.subplots(figsize=(4, 4), layout="constrained")
    yield made
    plt.close(figure)


def boxes(axes: Any) -> dict[str, Any]:
    """The boxes of the names' letters in pixels, without the lines that lead to them."""
    from matplotlib.text import Text

    axes.figure.draw_without_rendering()
    renderer = axes.figure.canvas.get_renderer()
    return {text.get_text(): Text.get_window_extent(text, renderer) for text in axes.texts}


def overlaps(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of names that share more than a pixel."""
    return [(a, b) for (a, one), (b, other) in combinations(found.items(), 2) if one.padded(-1).overlaps(other)]


def test_names_of_a_crowd_hide_neither_each_other_nor_points(axes: Any) -> None:
    axes.plot([name.at[0] for name in CROWD], [name.at[1] for name in CROWD], "o")
    axes.margins(0.4)
    others = [(2.98, 0.11), (3.1, 0.105)]
    name_points(axes, CROWD, others)
    found = boxes(axes)
    assert set(found) == {name.text for name in CROWD}
    assert overlaps(found) == []
    frame = axes.get_window_extent()
    for text, box in found.items():
        assert frame.contains(box.x0, box.y0), text
        assert frame.contains(box.x1, box.y1), text
    for at in (*(name.at for name in CROWD), *others):
        x, y = axes.transData.transform(at)
        assert [text for text, box in found.items() if box.contains(x, y)] == []


def test_a_name_stands_next_to_its_point(axes: Any) -> None:
    axes.plot([1, 2], [1, 2], "o", linestyle="None")
    axes.margins(0.3)
    name_points(axes, [Name("one", (1, 1), "black"), Name("two", (2, 2), "black")])
    for name, box in boxes(axes).items():
        x, y = axes.transData.transform({"one": (1, 1), "two": (2, 2)}[name])
        assert 0 < box.x0 - x < 15
        assert box.y0 < y < box.y1


def test_names_of_one_place_do_not_hide_each_other(axes: Any) -> None:
    axes.plot([1, 2], [1, 2], "o", linestyle="None")
    axes.margins(0.5)
    name_points(axes, [Name(name, (1, 1), "black") for name in ("one", "another", "a third")])
    assert overlaps(boxes(axes)) == []


def test_a_name_is_nearer_to_its_own_point_than_to_another(axes: Any) -> None:
    """At the usual place, on the right, a name of this width would end right before the next point."""
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    axes.figure.draw_without_rendering()
    written = axes.text(0, 0, "left", fontsize=8.5)
    width = written.get_window_extent(axes.figure.canvas.get_renderer()).width
    written.remove()
    x, y = axes.transData.transform((4, 5))
    at = {
        "left": (4, 5),
        "right": tuple(axes.transData.inverted().transform((x + width + 12.5 * axes.figure.dpi / 72, y))),
    }
    name_points(axes, [Name(name, place, "black") for name, place in at.items()])
    for name, box in boxes(axes).items():
        far = {other: _distance(box, *axes.transData.transform(place)) for other, place in at.items()}
        assert min(far, key=far.__getitem__) == name


def _distance(box: Any, x: float, y: float) -> float:
    return float(max(box.x0 - x, 0, x - box.x1) ** 2 + max(box.y0 - y, 0, y - box.y1) ** 2)


def test_a_name_is_not_struck_through(axes: Any) -> None:
    """By a line that leaves its point to the right, where names usually stand."""
    axes.plot([1, 2], [1, 1], "-")
    axes.margins(0.3)
    name_points(axes, [Name("flat", (1, 1), "black")])
    (box,) = boxes(axes).values()
    xs = range(int(axes.transData.transform((1, 1))[0]), int(axes.transData.transform((2, 1))[0]))
    assert [x for x in xs if box.contains(x, axes.transData.transform((1, 1))[1])] == []


def test_names_of_curves_stand_below_each_other_at_their_ends(axes: Any, tmp_path: Path) -> None:
    """Also of curves that end in the same place, and within the picture."""
    ends = {"high": 3.0, "a": 2.0, "b": 2.0, "c": 2.01, "low": 1.0}
    for y in ends.values():
        axes.plot([0, 1], [0, y])
    name_curves(axes, [Name(name, (1, y), "black") for name, y in ends.items()])
    found = boxes(axes)
    assert overlaps(found) == []
    assert sorted(found, key=lambda name: -found[name].y0)[0] == "high"
    assert sorted(found, key=lambda name: found[name].y0)[0] == "low"
    assert found["c"].y0 > max(found["a"].y0, found["b"].y0)
    right, width = axes.transData.transform((1, 0))[0], axes.figure.bbox.width
    assert all(right < box.x0 and box.x1 <= width for box in found.values())
    for name in ("high", "low"):  # far from all others: at the height of its end
        assert found[name].y0 < axes.transData.transform((1, ends[name]))[1] < found[name].y1
    assert "high" in save(axes.figure, tmp_path / "p.png", "t").svg

"""What all pictures share: an SVG whose bytes depend on its data only, and plain axes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_kvq.drawing import pyplot

STYLE = {
    "svg.hashsalt": "vllm_kvq",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e6ea",
    "axes.axisbelow": True,
    "figure.facecolor": "white",
}


def fingerprint(data: Any) -> str:
    """A hash of what a picture shows, kept in its file: it tells whether the picture is up to date."""
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]


@contextmanager
def picture(path: Path, data: Any, panels: int, size: tuple[float, float], lines: int = 1) -> Iterator[Sequence[Any]]:
    """The axes of `panels` panels on each of `lines` lines, written to `path` when `data` is drawn there."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(lines, panels, figsize=size, squeeze=False, layout="constrained")
        try:
            yield list(axes.flat)
            about = {"Date": None, "Creator": "python -m proof pictures", "Description": fingerprint(data)}
            figure.savefig(path, metadata=about)
        finally:
            plt.close(figure)


def tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def label(axes: Any, text: str, at: tuple[float, float], offset: tuple[float, float], color: str) -> None:
    """A name next to its point, instead of a legend."""
    axes.annotate(text, at, offset, textcoords="offset points", color=color, fontsize=9, va="center")

"""A figure as a file, and as SVG that a page shows in its own colours. Needs matplotlib."""

from __future__ import annotations

import io
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

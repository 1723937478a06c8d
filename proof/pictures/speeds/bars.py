"""Bars of times bf16 by format and context, one shade for each context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proof.pictures.canvas import tokens
from vllm_kvq.naming import OURS, QUIET

SHADES = (0.45, 0.7, 1.0)
LIMIT = "fewer bytes read: the limit if only memory decided"
Times = Mapping[str, Mapping[int, tuple[float, float]]]
"""Format -> context -> times bf16, and how many times fewer bytes are read."""


def top(panels: Iterable[Times]) -> float:
    """The top of all panels' axes: room for a legend above the largest limit."""
    return 1.3 * max(max(pair) for found in panels for at in found.values() for pair in at.values())


def draw(axes: Any, found: Times, title: str) -> None:
    contexts = sorted({context for at in found.values() for context in at})
    width = 0.8 / len(contexts)
    for i, context in enumerate(contexts):
        places = [n + (i - (len(contexts) - 1) / 2) * width for n in range(len(found))]
        times, limits = zip(*(at[context] for at in found.values()), strict=True)
        axes.bar(places, times, 0.92 * width, color=OURS, alpha=SHADES[i], label=f"{tokens(context)} tokens")
        marks = axes.scatter(places, limits, marker="_", s=90, color=QUIET, linewidths=1.5)
    marks.set_label(LIMIT)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_xlim(-0.6, len(found) - 0.4)
    axes.grid(False, axis="x")
    axes.set_title(title, fontsize=10, loc="left")


def legend(axes: Any, columns: int) -> None:
    """Contexts first, then the limit."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i] == LIMIT)
    shown = [handles[i] for i in order], [labels[i] for i in order]
    axes.legend(*shown, fontsize=8, frameon=False, ncols=columns, loc="upper left")

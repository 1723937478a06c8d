"""A prefix hit drawn to scale: a request, the same one again, and another one that begins alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.pictures.canvas import picture
from proof.pictures.explained.page import FORMAT, bound
from vllm_kvq.formats import PageFormat
from vllm_kvq.naming import OTHERS, OURS

INK = "#5b626d"
REQUEST, ALIKE = 540, 300
"""Tokens of each request, and those with which the last one begins like the first."""
HEIGHT, APART, MARGIN = 0.46, 1.15, 118
"""The height of a row and the distance of rows; the width, in tokens, of the rows' names on the left."""


@dataclass(frozen=True)
class Part:
    name: str
    tokens: int
    packed: bool
    found: bool
    """In the prefix cache; otherwise the request computes and stores it itself."""


def hit(fmt: PageFormat, tokens: int, alike: int) -> int:
    """The tokens that a prompt finds of one that began alike: whole pages, and never any of its newest W."""
    return min(alike, tokens - 1 - fmt.W) // fmt.N * fmt.N


def parts(fmt: PageFormat, tokens: int, found: int) -> list[Part]:
    """From the first token to the newest."""
    packed = (tokens - fmt.W) // fmt.unit * fmt.unit
    pages = [(i, min(fmt.N, packed - i * fmt.N)) for i in range(-(-packed // fmt.N))]
    shown = [Part(f"page {i}", size - (0 if i else fmt.S), True, i * fmt.N < found) for i, size in pages]
    newest = tokens - packed
    return [Part(f"{fmt.S} sinks", fmt.S, False, found > 0), *shown, Part(f"newest {newest}", newest, False, False)]


def data() -> list[tuple[str, int, list[Part]]]:
    """Three requests: what each is, the tokens that it finds, and its parts."""
    fmt = bound()
    again, other = hit(fmt, REQUEST, REQUEST), hit(fmt, REQUEST, ALIKE)
    return [
        (f"A request of\n{REQUEST} tokens", 0, parts(fmt, REQUEST, 0)),
        ("The same\ntokens again", again, parts(fmt, REQUEST, again)),
        (f"Another one: its\nfirst {ALIKE} tokens\nare the same", other, parts(fmt, REQUEST, other)),
    ]


def draw(path: Path) -> None:
    rows = data()
    with picture(path, rows, 1, (10.5, 3.6)) as (axes,):
        axes.set_axis_off()
        axes.set_xlim(-MARGIN, REQUEST + 2)
        axes.set_ylim(-APART * (len(rows) - 1) - 0.5, 0.75)
        axes.text(-MARGIN, 0.75, f"{FORMAT}, pages of {bound().N} tokens", weight="bold", va="top")
        for i, (about, found, shown) in enumerate(rows):
            _row(axes, -APART * i, about, found, shown)


def _row(axes: Any, y: float, about: str, found: int, shown: list[Part]) -> None:
    axes.text(-MARGIN, y, about, fontsize=9.5, va="center")
    x = 0
    for part in shown:
        color, middle = (OURS if part.packed else OTHERS), x + part.tokens / 2
        ground, ink = ("white", color) if part.found else (color, "white")
        axes.barh(y, part.tokens - 1.5, HEIGHT, left=x + 0.75, color=ground, edgecolor=color, linewidth=1.2)
        if part.found and part.packed:  # a reference to the page of the request above
            axes.annotate("", (middle, y + HEIGHT / 2), (middle, y + HEIGHT / 2 + 0.32),
                          arrowprops={"arrowstyle": "<|-", "color": color, "linewidth": 1})  # fmt: skip
        if part.tokens > 20:
            axes.text(middle, y, part.name, color=ink, fontsize=8.5, ha="center", va="center")
        else:
            axes.text(x, y - 0.29, part.name, color=color, fontsize=8, va="top")
        x += part.tokens
    for begin, end, said, color in (
        (0, found, f"found: {found} tokens, which are read packed", OURS),
        (found, x, f"computed: {x - found} tokens, its own pages and window", INK),
    ):
        if end > begin:
            axes.text((begin + end) / 2, y - 0.29, said, color=color, fontsize=8, ha="center", va="top")

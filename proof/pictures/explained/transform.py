"""Transformed keys: one head's channels with their variance, bits and errors, and what that gains in every head.

From the recorded results of `python -m proof spectrum`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from proof.pictures.canvas import label, picture
from proof.tables.transformed.spectrum import BITS, CHANNELS, HEADS, Channel, Head, middle
from vllm_kvq.naming import OTHERS, OURS

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
MODEL = "SmolLM2-135M"
SHADES = {0: "#c9ccd2", 2: "#a8c4e2", 4: "#5b8fc7", 6: "#1a4a80"}
"""Colours by a channel's bits."""
LEAST = 1e-5
"""The least share of the variance that is shown."""


def recorded(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def heads() -> list[Head]:
    return [Head(int(r["layer"]), int(r["head"]), float(r["equal"]), float(r["by_channel"])) for r in recorded(HEADS)]


def channels() -> list[Channel]:
    return [
        Channel(float(r["variance"]), int(r["bits"]), float(r["equal"]), float(r["by_channel"]))
        for r in recorded(CHANNELS)
    ]


def data() -> tuple[list[Head], list[Channel]]:
    return heads(), channels()


def draw(path: Path) -> None:
    found = data()
    with picture(path, found, 3, (10.5, 3.7)) as (spectrum, errors, scores):
        _spectrum(spectrum, found[1])
        _errors(errors, found[1])
        _scores(scores, found[0])


def _spectrum(axes: Any, of_head: list[Channel]) -> None:
    for bits, color in SHADES.items():
        some = [(i, max(c.variance, LEAST)) for i, c in enumerate(of_head) if c.bits == bits]
        if some:
            axes.bar(*zip(*some, strict=True), 0.9, color=color, label=f"{bits} bits ({len(some)})")
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    _by_channel(axes, "variance, and the bits that it gets", "share of variance")


def _errors(axes: Any, of_head: list[Channel]) -> None:
    numbers = range(len(of_head))
    for name, of_channels, color in (
        (f"{BITS} bits each", [c.equal for c in of_head], OTHERS),
        ("bits by variance", [c.by_channel for c in of_head], OURS),
    ):
        axes.plot(numbers, of_channels, "o", color=color, markersize=3, label=f"{name}: {sum(of_channels):.1%} in all")
    axes.legend(fontsize=8, frameon=False, handletextpad=0.2, loc="upper right")
    _by_channel(axes, "squared error", "squared error, share of variance")


def _by_channel(axes: Any, title: str, label: str) -> None:
    axes.set_yscale("log")
    axes.set_ylim(LEAST, 1)
    axes.set_xlabel("channels after the transform")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10, loc="left")


def _scores(axes: Any, found: list[Head]) -> None:
    shown, most = middle(found), max(head.equal for head in found) * 1.08
    axes.plot([0, most], [0, most], color="black", linewidth=0.8)
    axes.plot([h.equal for h in found], [h.by_channel for h in found], "o", color=OURS, markersize=3)
    axes.plot(shown.equal, shown.by_channel, "o", color=OTHERS, markersize=5)
    label(axes, "the head on the left", (shown.equal, shown.by_channel), (-45, -45), OTHERS)
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    axes.set_xlabel(f"relative error, {BITS} bits each")
    axes.set_ylabel("relative error, bits by variance")
    axes.set_title(f"error of scores, {len(found)} heads", fontsize=10, loc="left")

"""Quality against bits: six formats on the pretrained models, from the results that docs/quality.md prints."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.pictures.canvas import OTHERS, OURS, label, picture, tokens
from vllm_kvq.formats import FORMATS

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "quality"
CONTEXT = 4096
MODELS = {
    "qwen2.5-1.5b": "Qwen2.5-Coder-1.5B (d = 128)",
    "qwen2.5-0.5b": "Qwen2.5-Coder-0.5B (d = 64)",
    "smollm2-135m": "SmolLM2-135M (d = 64)",
}
"""Gemma-3-270M is not shown: most of its layers have windows, which are not packed."""
OFFSETS: dict[str, tuple[float, float]] = {"squat2": (7, -8), "kitty2": (7, 6), "squat4": (7, -7), "polar4": (7, 4)}
"""Where the usual place of a name, to the right of its point, is taken by another one's."""


@dataclass(frozen=True)
class Point:
    name: str
    bits: float
    kl: float
    low: float
    high: float


def points(model: str) -> list[Point]:
    """All formats that were measured at this length; the baseline has no error by definition."""
    with (RESULTS / f"real-{model}-{CONTEXT}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "text" and row["label"] != "auto"]
    return [
        Point(row["label"], *(float(row[column]) for column in ("bits", "kl", "kl_low", "kl_high"))) for row in rows
    ]


def data() -> dict[str, list[Point]]:
    return {model: points(model) for model in MODELS}


def draw(path: Path) -> None:
    found = data()
    with picture(path, found, len(MODELS), (10.5, 3.9)) as panels:
        for axes, model in zip(panels, MODELS, strict=True):
            _panel(axes, found[model])
            axes.set_title(MODELS[model], fontsize=10)
        panels[0].set_ylabel("KL divergence from the 16-bit cache, nats")


def _panel(axes: Any, found: list[Point]) -> None:
    for point in found:
        color = OURS if point.name in FORMATS else OTHERS
        bars = [[point.kl - point.low], [point.high - point.kl]]
        axes.errorbar(point.bits, point.kl, yerr=bars, fmt="o", color=color, markersize=5, capsize=2, linewidth=1)
        label(axes, point.name, (point.bits, point.kl), OFFSETS.get(point.name, (7, 0)), color)
    axes.set_yscale("log")
    axes.set_ylim(3e-4, 1)
    axes.set_xlim(2.5, 9.3)
    axes.set_xlabel(f"bits per number, in all, over {tokens(CONTEXT)} tokens")

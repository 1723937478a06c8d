"""Quality against bits on the demo model, of texts that are given: with wide key channels, and as the model is."""

from __future__ import annotations

from pathlib import Path

from proof.pictures.kl import measured

NAME = "4096"
PANELS = (
    ("outliers: mean KL", "outliers", "kl"),
    ("outliers: 99.9th percentile", "outliers", "kl_p999"),
    ("demo: mean KL", "demo", "kl"),
)
"""Title, model and metric."""


def data() -> list[measured.Panel]:
    return [(title, metric, measured.rows(f"{model}-{NAME}", metric)) for title, model, metric in PANELS]


def draw(path: Path) -> None:
    panels = data()
    measured.draw(path, panels, panels, "KL divergence from the 16-bit cache,\nnats per token", alike=False)

"""Quality against bits on the demo model, of texts that formats generate: wide key channels, and the model as it is."""

from __future__ import annotations

from pathlib import Path

from proof.pictures.kl import measured

METRIC = "kl"
MODELS = ("outliers", "demo")


def data() -> list[measured.Panel]:
    return [(model, METRIC, measured.rows(f"{model}-generated", METRIC)) for model in MODELS]


def draw(path: Path) -> None:
    panels = data()
    measured.draw(path, panels, panels, "KL divergence from the 16-bit cache,\nnats per token")

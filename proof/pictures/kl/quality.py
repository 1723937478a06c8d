"""Quality against bits on the pretrained models, of all formats that were measured at this length."""

from __future__ import annotations

from pathlib import Path

from proof.pictures.kl import measured
from vllm_kvq.eval.results.result import Row

CONTEXT = 4096
METRIC = "kl"
NAMED = 6
"""Points with names in each panel: vLLM's fp8 and the formats of budgets."""
MODELS = {
    "qwen2.5-1.5b": "Qwen2.5-Coder-1.5B (d = 128)",
    "qwen2.5-0.5b": "Qwen2.5-Coder-0.5B (d = 64)",
    "smollm2-135m": "SmolLM2-135M (d = 64)",
}
"""Gemma-3-270M is not shown: most of its layers have windows, which are not packed."""


def data() -> dict[str, list[Row]]:
    return {model: rows(model) for model in MODELS}


def rows(model: str) -> list[Row]:
    """The rows of all files at this length; what several have is the first one's, whose name is the shortest."""
    found: dict[str, Row] = {}
    for path in sorted(measured.RESULTS.glob(f"real-{model}-{CONTEXT}*.csv"), key=lambda path: (len(path.name), path)):
        for row in measured.rows(path.stem, METRIC):
            found.setdefault(row.label, row)
    return [*found.values()]


def draw(path: Path) -> None:
    found = data()
    panels = [(title, METRIC, found[model]) for model, title in MODELS.items()]
    measured.draw(path, found, panels, "KL divergence from the 16-bit cache,\nnats per token", most=NAMED)

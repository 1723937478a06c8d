"""The same as speed.svg on a GPU, of one request and of many: against the faster of bf16's attention kernels."""

from __future__ import annotations

from pathlib import Path

from proof.pictures.canvas import picture
from proof.pictures.speeds import bars
from vllm_kvq.bench.gpu.decode import bf16_bytes
from vllm_kvq.bench.gpu.kept import Kept

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "gpu-nvidia-h200.csv"
DEVICE = "NVIDIA H200"
BATCHES = {1: "one request", 64: "64 requests"}


def data() -> dict[int, bars.Times]:
    """By the number of requests."""
    found: dict[int, dict[str, dict[int, tuple[float, float]]]] = {batch: {} for batch in BATCHES}
    for step in Kept.of(RESULTS).steps():
        if step.shape.batch in found and not step.rival:
            pair = step.bf16 / step.seconds, bf16_bytes(step.shape) / step.read
            found[step.shape.batch].setdefault(step.name, {})[step.shape.context] = pair
    return {**found}


def draw(path: Path) -> None:
    found = data()
    with picture(path, found, len(BATCHES), (10.5, 3.7)) as panels:
        for axes, (batch, about) in zip(panels, BATCHES.items(), strict=True):
            bars.draw(axes, found[batch], f"{DEVICE}, {about}")
            axes.set_ylim(0, bars.top(found.values()))
        panels[0].set_ylabel("times bf16's attention")
        bars.legend(panels[0], 2)

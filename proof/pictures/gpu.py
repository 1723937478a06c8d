"""The same as speed.svg on a GPU, of one request and of many: against the faster of bf16's attention kernels."""

from __future__ import annotations

from pathlib import Path

from proof.pictures import bars
from proof.pictures.canvas import picture
from vllm_kvq.bench.gpu.results import Measured, read
from vllm_kvq.bench.gpu.rivals import BF16
from vllm_kvq.formats import FORMATS

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "gpu-nvidia-h200.csv"
DEVICE = "NVIDIA H200"
BATCHES = {1: "one request", 64: "64 requests"}


def data() -> dict[int, bars.Times]:
    """By the number of requests."""
    rows = read(RESULTS)
    return {batch: times([row for row in rows if row.batch == batch]) for batch in BATCHES}


def times(rows: list[Measured]) -> bars.Times:
    plain: dict[int, Measured] = {}
    for row in (row for row in rows if row.what in BF16):
        plain[row.context] = min(row, plain.get(row.context, row), key=lambda row: row.seconds)
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for row in (row for row in rows if row.what in FORMATS and row.context in plain):
        base = plain[row.context]
        found.setdefault(row.what, {})[row.context] = base.seconds / row.seconds, base.read / row.read
    return found


def draw(path: Path) -> None:
    found = data()
    with picture(path, found, len(BATCHES), (10.5, 3.7)) as panels:
        for axes, (batch, about) in zip(panels, BATCHES.items(), strict=True):
            bars.draw(axes, found[batch], f"{DEVICE}, {about}")
            axes.set_ylim(0, bars.top(found.values()))
        panels[0].set_ylabel("times bf16's attention")
        bars.legend(panels[0], 2)

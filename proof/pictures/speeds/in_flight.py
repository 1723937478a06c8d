"""Tokens per second against requests in flight, of servers with equal bytes of cache under the same load.

From the recorded results of `vllm-kvq bench capacity`.
"""

from __future__ import annotations

import csv
from pathlib import Path

from proof.pictures.canvas import picture
from vllm_kvq.bench import figures

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
LOADS = {
    "capacity-qwen2.5-0.5b-512.csv": "32 requests of 512 + 512 tokens, 64 MiB of cache",
    "capacity-qwen2.5-0.5b-4096.csv": "8 requests of 4096 + 200 tokens, 160 MiB of cache",
}
"""As the commands in docs/benchmarks.md have them."""
WHERE = "Qwen2.5-Coder-0.5B on two cores of an AMD EPYC (Zen 4)"


def data() -> dict[str, dict[str, tuple[float, float]]]:
    return {name: recorded(RESULTS / name) for name in LOADS}


def recorded(path: Path) -> dict[str, tuple[float, float]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    return {row["cache"]: (float(row["in_flight"]), float(row["tokens_per_second"])) for row in rows}


def draw(path: Path) -> None:
    found = data()
    with picture(path, found, len(LOADS), (10, 4)) as panels:
        panels[0].figure.suptitle(WHERE, fontsize=10)
        for axes, (name, load) in zip(panels, LOADS.items(), strict=True):
            axes.set_title(load, fontsize=9, loc="left")
            figures.points(axes, found[name], figures.IN_FLIGHT, figures.OUTPUT)

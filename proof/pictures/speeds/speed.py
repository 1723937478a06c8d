"""How many times as fast as vLLM's bf16 attention a decode step is, by context, from recorded measurements."""

from __future__ import annotations

import csv
from pathlib import Path

from proof.pictures.canvas import picture
from proof.pictures.speeds import bars

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
PROCESSORS = {
    "cpu-attention-zen3.csv": "AMD EPYC (Zen 3, AVX2)",
    "cpu-attention-zen4.csv": "AMD EPYC (Zen 4, AVX-512 with VNNI)",
    "cpu-attention-cascadelake.csv": "Intel Xeon at 2.5 GHz (Cascade Lake, AVX-512 with VNNI)",
}
"""Where caches exceeded the processor's, as those of a model's layers do."""
BASELINES = ("bf16", "fp8")


def data() -> dict[str, bars.Times]:
    return {name: times(RESULTS / name) for name in PROCESSORS}


def times(path: Path) -> bars.Times:
    found: dict[str, dict[int, tuple[float, float]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kernel"] not in BASELINES:
                at = found.setdefault(row["kernel"], {})
                at[int(row["context"])] = float(row["x_bf16"]), float(row["limit_bf16"])
    return found


def draw(path: Path) -> None:
    found = data()
    with picture(path, found, 1, (9.5, 9.0), lines=len(PROCESSORS)) as panels:
        for axes, (name, processor) in zip(panels, PROCESSORS.items(), strict=True):
            bars.draw(axes, found[name], f"{processor}, two threads")
            axes.set_ylabel("times vLLM's bf16 attention")
            axes.set_ylim(0, bars.top(found.values()))
        bars.legend(panels[0], 4)

"""The rows of a measurement as CSV, and as a plot of time against context."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvq.bench.steps import Shape
from vllm_kvq.bench.timing import Row
from vllm_kvq.drawing import Picture, pyplot, save

Measured = list[tuple[Shape, list[Row]]]
Curves = dict[str, list[tuple[int, float]]]
"""Name -> (context, milliseconds)."""
STYLES = {"bf16": "k--o", "fp8": "k:o", "sdpa": "k--o", "sdpa-flash": "k-.o", "flash_attn": "k--s", "vllm-fa3": "k--^"}
"""The caches that store 16 or 8 bits."""


def records(measured: Measured, threads: int, isa: str) -> list[dict[str, Any]]:
    """One row per candidate and shape."""
    return [
        {
            **{"kernel": row.name, **vars(shape), "threads": threads, "isa": isa},
            **{"ms": round(row.ms, 4), "best_ms": round(row.best, 4), "bytes": row.nbytes},
            **{"gb_per_s": round(row.gb_per_s, 2), "times_the_copy": round(row.floor, 2)},
            **{f"x_{base}": round(ratio, 3) for base, ratio in row.ratio.items()},
            **{f"limit_{base}": round(ratio, 3) for base, ratio in row.limit.items()},
        }
        for shape, rows in measured
        for row in rows
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, measured: Measured, title: str) -> Picture:
    """Milliseconds per decode step and layer against context."""
    curves: Curves = {}
    for shape, rows in measured:
        for row in rows:
            curves.setdefault(row.name, []).append((shape.context, row.ms))
    return draw(
        path, {"": {f"vLLM {name}" if name in STYLES else name: points for name, points in curves.items()}}, title
    )


def draw(path: Path, panels: Mapping[str, Curves], title: str) -> Picture:
    """Panels side by side of milliseconds per decode step and layer against context, all axes logarithmic."""
    size = (8 * len(panels), 5)
    figure, row = pyplot().subplots(1, len(panels), figsize=size, dpi=120, squeeze=False, layout="constrained")
    for axes, (above, curves) in zip(row[0], panels.items(), strict=True):
        for name, points in curves.items():
            style = STYLES.get(name.removeprefix("vLLM "), "-o")
            axes.plot(*zip(*sorted(points), strict=True), style, label=name, markersize=4)
        contexts = sorted({context for points in curves.values() for context, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [f"{c // 1024}k" if c % 1024 == 0 else str(c) for c in contexts])
        axes.set_xlabel("tokens in the cache, per request")
        axes.set_ylabel("ms per decode step and layer")
        axes.set_title(above, fontsize=9)
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    return save(figure, path, title)

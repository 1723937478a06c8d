"""How many times as fast as vLLM's bf16 attention a decode step is, by context, from recorded measurements."""

from __future__ import annotations

import csv
from pathlib import Path

from proof.pictures.canvas import OURS, QUIET, picture, tokens

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "cpu-attention-zen3.csv"
PROCESSOR = "AMD EPYC (Zen 3, AVX2), two threads, caches that exceed the processor's"
SHADES = (0.45, 0.7, 1.0)
BASELINE = "bf16"


def data() -> dict[str, dict[int, tuple[float, float]]]:
    """Format -> context -> times bf16, and how many times fewer bytes are read."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["kernel"] != BASELINE:
                at = found.setdefault(row["kernel"], {})
                at[int(row["context"])] = float(row["x_bf16"]), float(row["limit_bf16"])
    return found


def draw(path: Path) -> None:
    found = data()
    contexts = sorted({context for at in found.values() for context in at})
    width = 0.8 / len(contexts)
    with picture(path, found, 1, (9, 3.6)) as (axes,):
        for i, context in enumerate(contexts):
            places = [n + (i - (len(contexts) - 1) / 2) * width for n in range(len(found))]
            times, limits = zip(*(at[context] for at in found.values()), strict=True)
            axes.bar(places, times, 0.92 * width, color=OURS, alpha=SHADES[i], label=f"{tokens(context)} tokens")
            marks = axes.scatter(places, limits, marker="_", s=130, color=QUIET, linewidths=1.5)
        marks.set_label("fewer bytes read: the limit if only memory decided")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(found)), list(found))
        axes.grid(False, axis="x")
        axes.set_ylabel("times vLLM's bf16 attention")
        axes.set_title(f"One layer's decode step, {PROCESSOR}", fontsize=10, loc="left")
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper left")
        axes.set_ylim(0, 6.8)

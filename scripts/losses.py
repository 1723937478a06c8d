"""Writes what `vllm-kvq check MODEL` says of the formats' losses, from docs/results/quality.

python scripts/losses.py
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from vllm_kvq.formats.table import PLAIN

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "quality"
WRITTEN = ROOT / "vllm_kvq" / "integration" / "advice" / "losses.csv"
MODELS = {
    "smollm2-135m": ("SmolLM2-135M", 64, "no"),
    "qwen2.5-0.5b": ("Qwen2.5-Coder-0.5B", 64, "yes"),
    "qwen2.5-1.5b": ("Qwen2.5-Coder-1.5B", 128, "yes"),
    "gemma-3-270m": ("Gemma-3-270M", 256, "no"),
}
"""Name, head size and whether key biases are large, of what `python -m proof weights` brings."""
CONTEXT = 1024
HEAD = ("model", "head_size", "key_biases", "context", "format", "kl")
TABLES = ("", "-klt")
"""The tables of docs/quality.md, with different numbers of texts; what two of them have is taken from the first."""


def losses() -> str:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(HEAD)
    for name, (title, head_size, biases) in MODELS.items():
        found: dict[str, str] = {}
        for table in TABLES:
            path = RESULTS / f"real-{name}-{CONTEXT}{table}.csv"
            found = (_kl(path) if path.exists() else {}) | found
        for label, kl in found.items():
            out.writerow((title, head_size, biases, CONTEXT, label, kl))
    return text.getvalue()


def _kl(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row["label"]: f"{float(row['kl']):.2g}" for row in csv.DictReader(file) if row["label"] != PLAIN}


if __name__ == "__main__":
    WRITTEN.write_text(losses(), encoding="utf-8")
    print(f"{WRITTEN.relative_to(ROOT)} written")

"""Writes what `vllm-kvq check MODEL` says of the formats' speed, from docs/results/cpu-attention*.csv and gpu-*.csv.

On a CPU only where caches exceeded the processor's, as those of a model's layers do: one cache that is read again and
again stays in it, and a model would not be as fast. On a GPU, which serves many at a time, that of several requests.

python scripts/speeds.py
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from vllm_kvq.bench.gpu.decode import HEAD as HEAD_SIZE
from vllm_kvq.bench.gpu.results import read
from vllm_kvq.bench.gpu.rivals import BF16
from vllm_kvq.formats import FORMATS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
WRITTEN = ROOT / "vllm_kvq" / "integration" / "advice" / "speeds.csv"
PROCESSORS = {
    "cpu-attention-zen3.csv": "AMD EPYC (Zen 3)",
    "cpu-attention.csv": "AMD Zen 5",
    "cpu-attention-avx512bw.csv": "Intel Skylake server",
    "cpu-attention-cascadelake.csv": "Intel Cascade Lake",
}
GPUS = {"gpu-nvidia-h200.csv": ("NVIDIA H200, 8 requests", "sm_90")}
BATCH = 8
HEAD = ("processor", "isa", "head_size", "context", "format", "times_bf16")
MODELS_LAYERS = "0"
"""`--rotate`: caches that exceed the processor's."""


def speeds() -> str:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(HEAD)
    for name, processor in PROCESSORS.items():
        with (RESULTS / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["rotate"] == MODELS_LAYERS and row["batch"] == "1" and row["kernel"] not in ("bf16", "fp8"):
                    times = f"{float(row['x_bf16']):.2g}"
                    out.writerow((processor, row["isa"], row["head_size"], row["context"], row["kernel"], times))
    for name, (processor, architecture) in GPUS.items():
        for context, kernel, gain in gpu_speeds(RESULTS / name):
            out.writerow((processor, architecture, HEAD_SIZE, context, kernel, f"{gain:.2g}"))
    return text.getvalue()


def gpu_speeds(path: Path) -> Iterator[tuple[int, str, float]]:
    """Against the fastest kernel for bf16, by context."""
    rows = [row for row in read(path) if row.batch == BATCH]
    for context in sorted({row.context for row in rows}):
        took = {row.what: row.seconds for row in rows if row.context == context}
        plain = min(seconds for what, seconds in took.items() if what in BF16)
        yield from ((context, what, plain / seconds) for what, seconds in took.items() if what in FORMATS)


if __name__ == "__main__":
    WRITTEN.write_text(speeds(), encoding="utf-8")
    print(f"{WRITTEN.relative_to(ROOT)} written")

"""Writes what `vllm-kvq check MODEL` says of the formats' speed, from docs/results/cpu-attention*.csv and gpu-*.csv.

On a CPU only where caches exceeded the processor's, as those of a model's layers do: one cache that is read again and
again stays in it, and a model would not be as fast. On a GPU, which serves many at a time, that of several requests.

python scripts/speeds.py
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from vllm_kvq.bench.gpu.decode import HEAD
from vllm_kvq.bench.gpu.kept import Kept

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
WRITTEN = ROOT / "vllm_kvq" / "integration" / "advice" / "speeds.csv"
PROCESSORS = {
    "cpu-attention-zen3.csv": "AMD EPYC (Zen 3)",
    "cpu-attention-zen4.csv": "AMD EPYC (Zen 4)",
    "cpu-attention.csv": "AMD Zen 5",
    "cpu-attention-avx512bw.csv": "Intel Skylake server",
    "cpu-attention-cascadelake.csv": "Intel Cascade Lake",
}
GPUS = {"gpu-nvidia-h200.csv": ("NVIDIA H200, 8 requests", "sm_90")}
BATCH = 8
COLUMNS = ("processor", "isa", "head_size", "context", "format", "times_bf16")
MODELS_LAYERS = "0"
"""`--rotate`: caches that exceed the processor's."""


def speeds() -> str:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(COLUMNS)
    for name, processor in PROCESSORS.items():
        with (RESULTS / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["rotate"] == MODELS_LAYERS and row["batch"] == "1" and row["kernel"] not in ("bf16", "fp8"):
                    times = f"{float(row['x_bf16']):.2g}"
                    out.writerow((processor, row["isa"], row["head_size"], row["context"], row["kernel"], times))
    for name, (processor, architecture) in GPUS.items():
        steps = [s for s in Kept.of(RESULTS / name).steps() if s.shape.batch == BATCH and not s.rival]
        for step in sorted(steps, key=lambda step: step.shape.context):
            times = f"{step.bf16 / step.seconds:.2g}"
            out.writerow((processor, architecture, HEAD, step.shape.context, step.name, times))
    return text.getvalue()


if __name__ == "__main__":
    WRITTEN.write_text(speeds(), encoding="utf-8")
    print(f"{WRITTEN.relative_to(ROOT)} written")

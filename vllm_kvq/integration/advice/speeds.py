"""How fast formats were measured to be on this kind of processor, for `vllm-kvq check`: speeds.csv, which
scripts/speeds.py writes from the recorded benchmarks (docs/benchmarks.md)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Speeds:
    """One processor at one length."""

    processor: str
    isa: str
    """The instruction set of our kernels (kernels/cpu/library.py), or a GPU's architecture, as in sm_90."""
    head_size: int
    context: int
    times_bf16: Mapping[str, float]
    """By format: how many times as fast as vLLM's bf16 a layer's attention in a decode step is."""

    def __post_init__(self) -> None:
        if self.head_size < 1 or self.context < 1 or not self.times_bf16:
            raise ValueError(f"{self.processor}: a measured processor has a head size, a length and results")

    @property
    def where(self) -> str:
        return f"{self.processor} at {self.context:,} tokens (head size {self.head_size})"


def measured() -> list[Speeds]:
    text = files(__package__).joinpath("speeds.csv").read_text(encoding="utf-8")
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in csv.DictReader(text.splitlines()):
        kind = (row["processor"], row["isa"], row["head_size"], row["context"])
        found.setdefault(kind, {})[row["format"]] = float(row["times_bf16"])
    return [Speeds(p, isa, int(d), int(context), times) for (p, isa, d, context), times in found.items()]


def nearest(isa: str | None, tokens: int) -> Speeds | None:
    """The length that is most like this one, where kernels for these instructions were measured."""
    known = [speeds for speeds in measured() if speeds.isa == isa]
    return min(known, key=lambda s: abs(math.log2(s.context / tokens)), default=None)

"""What formats were measured to lose on real models, for `vllm-kvq check`: losses.csv, which scripts/losses.py writes
from the recorded evaluations (docs/quality.md)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from vllm_kvq.integration.advice.hints import large
from vllm_kvq.integration.advice.key_biases import of_model, usually_biased
from vllm_kvq.integration.plan.served import Served

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Measured:
    """One model at one length."""

    model: str
    head_size: int
    key_biases: bool
    """Whether its key biases are large, which decides more than anything else which formats fail."""
    context: int
    kl: Mapping[str, float]
    """By format; `fp8` is among them."""

    def __post_init__(self) -> None:
        if self.head_size < 1 or self.context < 1 or not self.kl:
            raise ValueError(f"{self.model}: a measured model has a head size, a length and results")

    @property
    def where(self) -> str:
        kind = "large key biases" if self.key_biases else "no large key biases"
        fp8 = f"; fp8 has {self.kl['fp8']:.2g} there" if "fp8" in self.kl else ""
        return f"{self.model} at {self.context:,} tokens (head size {self.head_size}, {kind}){fp8}"


def measured() -> list[Measured]:
    text = files(__package__).joinpath("losses.csv").read_text(encoding="utf-8")
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in csv.DictReader(text.splitlines()):
        kind = (row["model"], row["head_size"], row["key_biases"], row["context"])
        found.setdefault(kind, {})[row["format"]] = float(row["kl"])
    return [Measured(m, int(d), b == "yes", int(context), kl) for (m, d, b, context), kl in found.items()]


def nearest(served: Served, vllm_config: VllmConfig) -> Measured:
    """The measured model that is most like this one: key biases first, then the head size."""
    size = served.format.geometry.head_size
    biases = of_model(vllm_config)
    return like(size, bool(large(biases, size)) if biases else usually_biased(vllm_config))


def like(head_size: int, key_biases: bool) -> Measured:
    return min(measured(), key=lambda m: (m.key_biases != key_biases, abs(math.log2(m.head_size / head_size))))

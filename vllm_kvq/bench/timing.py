"""Side-by-side timing: rounds are interleaved, and a ratio is the median over rounds of that round's ratio."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, field

import torch

from vllm_kvq.bench.steps import Candidate, Step
from vllm_kvq.bench.vllm_build import BASELINES

ROUND_SECONDS = 2e-3
"""A short step is repeated within a round until it takes this long."""
LONG = 4096
"""The context from which a step's time is expected to be a straight line."""


@dataclass(frozen=True)
class Row:
    """One candidate at one shape. `best` far below `ms`: other processes were using the processor."""

    name: str
    ms: float
    best: float
    nbytes: int
    floor: float
    """The time relative to copying the bytes."""
    ratio: dict[str, float] = field(default_factory=dict)
    """Baseline -> speedup over it."""
    limit: dict[str, float] = field(default_factory=dict)
    """Baseline -> how many times as many bytes it reads: the speedup where only memory decides."""

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.ms / 1e6


def seconds_per_step(steps: list[Step], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        for step in steps:
            step()
    return (time.perf_counter() - begin) / repeats / len(steps)


def copy_bandwidth(nbytes: int = 256 << 20, rounds: int = 7) -> float:
    """Bytes per second, read plus written, of copying memory with torch's number of threads."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    return (
        2 * len(source) / statistics.median(seconds_per_step([lambda: target.copy_(source)], 1) for _ in range(rounds))
    )


def compare(candidates: dict[str, Candidate], rounds: int, bandwidth: float) -> list[Row]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    repeats = {}
    for name, candidate in candidates.items():
        seconds_per_step(candidate.steps, 1)
        repeats[name] = max(1, int(ROUND_SECONDS / seconds_per_step(candidate.steps, 1) / len(candidate.steps)))
    for _ in range(rounds):
        for name, candidate in candidates.items():
            if len(candidate.steps) == 1:
                candidate.steps[0]()
            times[name].append(seconds_per_step(candidate.steps, repeats[name]))
    rows = []
    for name, candidate in candidates.items():
        middle = statistics.median(times[name])
        ratio = {
            base: statistics.median(b / t for b, t in zip(times[base], times[name], strict=True))
            for base in BASELINES
            if base in times
        }
        limit = {base: candidates[base].nbytes / candidate.nbytes for base in ratio}
        floor = middle * bandwidth / candidate.nbytes
        rows.append(Row(name, middle * 1e3, min(times[name]) * 1e3, candidate.nbytes, floor, ratio, limit))
    return rows


def slopes(milliseconds: dict[int, float]) -> list[float]:
    """The cost of an extra token between neighbouring contexts from LONG on, relative to the cost over the whole
    range: 1.0 everywhere is a straight line."""
    contexts = sorted(c for c in milliseconds if c >= LONG)
    if len(contexts) < 3:
        return []
    whole = (milliseconds[contexts[-1]] - milliseconds[contexts[0]]) / (contexts[-1] - contexts[0])
    return [(milliseconds[b] - milliseconds[a]) / (b - a) / whole for a, b in itertools.pairwise(contexts)]

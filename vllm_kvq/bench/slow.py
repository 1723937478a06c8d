"""Cases in which a format may be slow on the CPU: head sizes that are no power of two, and options.

The same measurement as `bench attention`, for these head sizes and for the options that the fast kernels do not serve
(kernels/cpu/slow.py). A ratio is the speed relative to vLLM's bf16 cache; for options there is also the time relative
to the same format without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvq.bench.steps import Candidate, Shape, kvq_candidate, vllm_candidate
from vllm_kvq.bench.timing import Row, compare

Wanted = Sequence[tuple[str, Mapping[str, Any]]]
"""Formats and options."""

HEAD_SIZES = (80, 96, 192)
"""80 is stored as 96. The planes of codes of these heads are not all whole vectors."""
USUAL_HEAD = 128
OPTIONS: Wanted = (
    ("squat2", {"group": 16}),
    ("squat2", {"group": 48}),
    ("squat2", {"values": "raw"}),
    ("qjl3", {"outlier_choice": "slab"}),
    ("innerq2", {"key_bits": 4}),
    ("innerq2", {"value_bits": 4}),
)
QUERY_HEADS, KV_HEADS, BLOCK = 32, 8, 128


def label(name: str, options: Mapping[str, Any]) -> str:
    return " ".join((name, *(f"{key}={value}" for key, value in options.items())))


def measure(context: int, rounds: int, head_size: int, wanted: Wanted) -> list[Row]:
    """bf16 first, followed by ours in order."""
    shape = Shape(context, 1, QUERY_HEADS, KV_HEADS, head_size, BLOCK)
    candidates: dict[str, Candidate] = {"bf16": vllm_candidate(shape, "auto")}
    candidates |= {label(name, options): kvq_candidate(shape, name, options) for name, options in wanted}
    return compare(candidates, rounds, 1.0)

"""A seeded request draws the same tokens however its prompt is chunked; plain vLLM 0.32 crashes on a chunk on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from proof.oracle.trace import Request, Result, Trace

pytestmark = pytest.mark.engine
DRAW = Random(3)
HOT = 2.0
"""The most that vLLM takes: the random model is sure of most of its choices, so answers are long, too."""


def request(name: str, length: int, **sampling: object) -> Request:
    return Request(name, tuple(DRAW.randrange(3, 250) for _ in range(length)), 200, **sampling)


SEEDED, OTHER = request("seeded", 300, temperature=HOT, seed=5), request("other seed", 150, temperature=HOT, seed=6)
GREEDY = request("greedy", 200)


def test_seeds_and_chunks(run: Callable[..., list[Result]]) -> None:
    todo = [Trace((SEEDED, OTHER, GREEDY))]
    (whole,) = run(todo, kv_cache_dtype="auto", max_num_batched_tokens=1024)
    (chunks,) = run(todo, kv_cache_dtype="lossless", max_num_batched_tokens=64)
    parts = [chunk.tokens for step in chunks.steps for chunk in step if chunk.request.startswith("seeded")]
    assert sum(parts[:-199]) == 300
    assert len(parts[:-199]) > 3
    assert chunks.outputs == whole.outputs


def test_the_seed_decides(run: Callable[..., list[Result]]) -> None:
    again, another = (Trace((replace(SEEDED, seed=seed),)) for seed in (5, 7))
    first, second, third = run([again, again, another], kv_cache_dtype="lossless", max_num_batched_tokens=64)
    assert first.outputs == second.outputs != third.outputs

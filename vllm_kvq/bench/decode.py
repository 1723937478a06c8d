"""Decoding speed of the whole engine: tokens per second of each format against the plain bf16 cache.

Two engines run at the same time, each in its own process, and take turns on the same prompts; the figure is the median
of the ratios of neighbouring turns, so a slow minute of the machine affects both. The time of a turn with one output
token is subtracted, which leaves the decode steps.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvq.formats.table import label
from vllm_kvq.integration.plan.memory import GIB, SPACE


@dataclass(frozen=True)
class Load:
    """What both engines are asked to do."""

    batch: int
    context: int
    """Prompt tokens per request."""
    tokens: int
    """Decoded tokens per request."""
    rounds: int
    eager: bool = False

    def __post_init__(self) -> None:
        if min(self.batch, self.context, self.tokens, self.rounds) < 1:
            raise ValueError("batch, context, tokens and rounds must be at least 1")

    @property
    def max_len(self) -> int:
        return self.context + self.tokens + 64


@dataclass(frozen=True)
class Row:
    """Medians over rounds."""

    format: str
    tokens_per_second: float
    bf16_tokens_per_second: float
    ratio: float


def _engine(model: str, kv_cache_dtype: str, load: Load, options: Mapping[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        model,
        kv_cache_dtype=kv_cache_dtype,
        additional_config={"kvq": dict(options)} if options else {},
        dtype="bfloat16",
        max_model_len=load.max_len,
        max_num_seqs=load.batch,
        enable_prefix_caching=False,
        enforce_eager=load.eager,
        kv_cache_memory_bytes=_cache_bytes(),
    )


def _cache_bytes() -> int | None:
    """What each engine's cache takes; None: the user or vLLM decides. On a CPU, vLLM would take most of the memory."""
    from vllm.platforms import current_platform

    return GIB if current_platform.is_cpu() and SPACE not in os.environ else None


def _seconds(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return time.perf_counter() - begin


def rows(model: str, formats: Sequence[tuple[str, Mapping[str, Any]]], load: Load) -> Iterator[Row]:
    """One row per format and its options, as it is measured."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 500) for _ in range(load.context)] for _ in range(load.batch)]
    plain = _engine(model, "auto", load, {})
    for format_name, options in formats:
        yield _row(plain, model, format_name, options, load, prompts)
        gc.collect()  # vLLM's objects may refer to each other; the engine stops with the last of them


def _row(
    plain: Any, model: str, format_name: str, options: Mapping[str, Any], load: Load, prompts: list[list[int]]
) -> Row:
    """Nothing refers to the format's engine afterwards."""
    packed, name = _engine(model, format_name, load, options), label(format_name, options)
    speeds: dict[str, list[float]] = {"bf16": [], name: []}
    for turn in range(load.rounds + 1):  # the first warms up
        for side, llm in (("bf16", plain), (name, packed)):
            seconds = _seconds(llm, prompts, load.tokens + 1) - _seconds(llm, prompts, 1)
            if turn:
                speeds[side].append(load.batch * load.tokens / seconds)
    ratio = statistics.median(b / a for a, b in zip(speeds["bf16"], speeds[name], strict=True))
    ours, plainly = (statistics.median(speeds[side]) for side in (name, "bf16"))
    return Row(name, ours, plainly, ratio)

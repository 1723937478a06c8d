"""A long request takes as many blocks of a real engine's pool as the start-up line counts for it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from lab import Lab

from proof.models import named
from proof.models.checkpoints import PROMPT_TOKENS
from proof.oracle.engines.forked import EngineProcess
from proof.oracle.trace import Request, Trace

pytestmark = pytest.mark.engine
LENGTH, BLOCKS = 1536, 2000


def watch(traced: Any) -> None:
    """Keeps the smallest number of free blocks that the scheduler of a TracedEngine has had."""
    pool, schedule = traced.scheduler.kv_cache_manager.block_pool, traced.scheduler.schedule
    traced.least = pool.get_num_free_blocks()

    def observed(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        traced.least = min(traced.least, pool.get_num_free_blocks())
        return out

    traced.scheduler.schedule = observed


def taken_and_said(traced: Any) -> tuple[int, int]:
    """Blocks in use at the peak, and what the line counts for a request of the maximum length."""
    from vllm_kvq.integration.worker.companions import Sidecar
    from vllm_kvq.integration.worker.report import Capacity

    layers = traced.engine.vllm_config.compilation_config.static_forward_context.values()
    served = next(layer for layer in layers if isinstance(layer, Sidecar)).report.args[0]
    return BLOCKS - 1 - traced.least, Capacity.of(served, BLOCKS).per_request


@pytest.mark.parametrize(
    ("name", "format_name", "windows"),
    [
        ("Llama", "innerq2", 0),
        ("Gemma-3", "squat2", 5),
        ("Gemma-3n", "squat2", 2),
        ("Gemma-4", "squat2", 5),
        ("Llama 4", "squat2", 3),
        ("Granite 4", "qjl3", 0),
        pytest.param("gpt-oss", "squat2", 2, marks=pytest.mark.wide),
        pytest.param("Nemotron-H", "kivi2", 0, marks=pytest.mark.wide),
        pytest.param("Falcon-H1", "lossless", 0, marks=pytest.mark.wide),
    ],
)
def test_a_request_takes_what_is_said(name: str, format_name: str, windows: int, lab: Lab) -> None:
    """vLLM counts one more block for each of the groups of `windows`, as a window may begin in the middle of one."""
    arch, rng = named(name), random.Random(3)
    prompt = tuple(rng.choice(PROMPT_TOKENS) for _ in range(LENGTH - 5))
    engine = {
        "dtype": arch.dtype,
        "skip_tokenizer_init": True,
        "kv_cache_dtype": format_name,
        "block_size": 32,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": BLOCKS,
    }
    with EngineProcess(str(lab.model(arch)), engine, {}, watch) as process:
        process.run(Trace((Request("long", prompt, 4),)))
        taken, said = process.call(taken_and_said)
    assert taken == said - windows


def most_at_once(traced: Any) -> None:
    """Keeps how many requests a TracedEngine computes at once."""
    schedule, traced.most = traced.scheduler.schedule, 0

    def observed(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        traced.most = max(traced.most, len(out.num_scheduled_tokens))
        return out

    traced.scheduler.schedule = observed


def ran(traced: Any) -> int:
    return traced.most


KINDS = {
    "Llama": "innerq2",
    "Gemma-3": "kivi2",
    "Gemma-3n": "squat2",
    "Gemma-4": "polar4",
    "gpt-oss": "kivi2",
    "Llama 4": "qjl3",
    "Granite 4": "squat2",
    "Nemotron-H": "lossless",
    "Falcon-H1": "innerq2",
}
WANTED, LONG, WINDOW = 6, 3072, 2048
"""Requests, the tokens of each, and of a window: so long that it hardly matters where in a block one begins."""


@pytest.mark.wide
@pytest.mark.parametrize("name", KINDS)
def test_so_many_requests_run_at_once(name: str, lab: Lab) -> None:
    """A pool that is announced to hold a number of requests holds them, and one that is 2 % smaller does not."""
    arch, rng = named(name), random.Random(5)
    own = {field: WINDOW for field in ("sliding_window", "attention_chunk_size") if field in arch.numbers}
    arch = replace(arch, name=f"{name} long", numbers={**arch.numbers, **own, "max_position_embeddings": LONG})
    prompts = [tuple(rng.choice(PROMPT_TOKENS) for _ in range(LONG - 31)) for _ in range(WANTED)]
    trace = Trace(tuple(Request(f"r{i}", prompt, 31) for i, prompt in enumerate(prompts)))
    engine = {
        "dtype": arch.dtype,
        "skip_tokenizer_init": True,
        "kv_cache_dtype": KINDS[name],
        "block_size": 32,
        "max_model_len": LONG,
        "max_num_batched_tokens": 512,
    }
    path = str(lab.model(arch))
    with EngineProcess(path, {**engine, "num_gpu_blocks_override": BLOCKS}, {}) as process:
        blocks = process.call(blocks_of_all)
    # block 0 is never handed out
    for size, fits in ((blocks + 1, True), (int(0.98 * blocks), False)):
        with EngineProcess(path, {**engine, "num_gpu_blocks_override": size}, {}, most_at_once) as process:
            preemptions = process.run(trace).preemptions
            assert (process.call(ran) == WANTED and not preemptions) == fits


def blocks_of_all(traced: Any) -> int:
    """The smallest pool that is announced to hold all these requests of the maximum length."""
    from vllm_kvq.integration.worker.companions import Sidecar
    from vllm_kvq.integration.worker.report import Capacity

    layers = traced.engine.vllm_config.compilation_config.static_forward_context.values()
    served = next(layer for layer in layers if isinstance(layer, Sidecar)).report.args[0]
    return next(n for n in range(1, 1 << 16) if Capacity.of(served, n).tokens >= WANTED * LONG)

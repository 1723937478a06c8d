"""A long request takes as many blocks of a real engine's pool as the start-up line counts for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from lab import Lab

from proof.models import named
from proof.models.checkpoints import PROMPT_TOKENS
from proof.oracle.forked import EngineProcess
from proof.oracle.trace import Request, Trace

pytestmark = pytest.mark.engine
LENGTH, BLOCKS = 1536, 2000


def watch(traced: Any) -> None:
    """Keeps the least number of free blocks that the scheduler of a TracedEngine has left."""
    pool, schedule = traced.scheduler.kv_cache_manager.block_pool, traced.scheduler.schedule
    traced.least = pool.get_num_free_blocks()

    def observed(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        traced.least = min(traced.least, pool.get_num_free_blocks())
        return out

    traced.scheduler.schedule = observed


def taken_and_said(traced: Any) -> tuple[int, int]:
    """Blocks in use when most were, and what the line counts for a request of the maximum length."""
    from vllm_kvq.integration.report import Capacity
    from vllm_kvq.integration.sidecar import Sidecar

    layers = traced.engine.vllm_config.compilation_config.static_forward_context.values()
    served = next(layer for layer in layers if isinstance(layer, Sidecar)).report.args[0]
    return BLOCKS - 1 - traced.least, Capacity.of(served, BLOCKS).per_request


@pytest.mark.parametrize(
    ("name", "format_name", "windows"),
    [
        ("Llama", "innerq2", 0),
        ("Gemma-3", "squat2", 5),
        ("Llama 4", "squat2", 3),
        ("Granite 4", "qjl3", 0),
        pytest.param("gpt-oss", "squat2", 2, marks=pytest.mark.wide),
        pytest.param("Nemotron-H", "kivi2", 0, marks=pytest.mark.wide),
        pytest.param("Falcon-H1", "lossless", 0, marks=pytest.mark.wide),
    ],
)
def test_a_request_takes_what_is_said(name: str, format_name: str, windows: int, lab: Lab) -> None:
    """vLLM counts a block more for each of the groups of `windows`, because a window may begin in the middle of one."""
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

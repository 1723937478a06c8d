"""The cost of KV cache groups in vLLM's scheduler, and the savings of separate pages for windows.

    python -m proof scheduler        minutes, and an idle machine

A Gemma-3 with the layers, windows and size of heads of a published one, but one head in each layer, and 16 requests
that decode: how many KV cache groups its windows make, how many times the tokens of 16 bits the pool holds, and how
long vLLM's scheduler takes for its part of a step. With pages of as many tokens as the packed layers' for windows,
too, and with those that are served.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from proof.models import named
from proof.models.checkpoints import PROMPT_TOKENS, write_model
from proof.oracle.engines.forked import EngineProcess
from proof.oracle.trace import Request, Trace
from vllm_kvq import console
from vllm_kvq.cli.arguments import words

SHAPES = {"1B": (26, 256, 512), "4B": (34, 256, 1024), "12B": (48, 256, 1024), "27B": (62, 128, 1024)}
"""Layers, head size and tokens of a window."""
LENGTH, REQUESTS, PROMPT, ANSWER = 32768, 16, 1100, 60
FORMAT, POOL = "squat2", 12
"""The pool has as many blocks as this many requests of the maximum length take."""


def as_packed_ones() -> None:
    """Pages of a window have as many tokens as packed ones."""
    from vllm_kvq.integration.plan import plan

    plan._window_block = lambda served, sizes: max(sizes)


def watch(traced: Any) -> None:
    """Has a TracedEngine keep the seconds that each call of its scheduler takes."""
    traced.seconds = {"schedule": [], "update_from_output": []}
    for name, seconds in traced.seconds.items():
        setattr(traced.scheduler, name, _timed(getattr(traced.scheduler, name), seconds))


def _timed(call: Any, seconds: list[float]) -> Any:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = call(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return out

    return timed


def found(traced: Any) -> tuple[int, int, float, float]:
    """Tokens of a window's page, KV cache groups, capacity as a multiple of 16 bits, and milliseconds of a step."""
    from vllm_kvq.integration.worker.companions import Sidecar
    from vllm_kvq.integration.worker.report import Capacity

    layers = traced.engine.vllm_config.compilation_config.static_forward_context.values()
    sidecar: Any = next(layer for layer in layers if isinstance(layer, Sidecar))
    served = sidecar.report.args[0]
    groups = len(traced.scheduler.kv_cache_config.kv_cache_groups)
    # steps in which all requests decode: the last ones
    parts = [seconds[-ANSWER // 2 :] for seconds in traced.seconds.values()]
    step = statistics.median(map(sum, zip(*parts, strict=True)))
    return served.window_block, groups, Capacity.of(served, 1 << 20).ratio, 1000 * step


def measure(path: str, block: int, before: Any) -> tuple[int, int, float, float]:
    rng = Random(0)
    prompts = [tuple(rng.choice(PROMPT_TOKENS) for _ in range(PROMPT)) for _ in range(REQUESTS)]
    engine = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "kv_cache_dtype": FORMAT,
        "block_size": block,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": 512,
        "pool": POOL,
        "before": before,
    }
    with EngineProcess(path, engine, {}, watch) as process:
        process.run(Trace(tuple(Request(f"r{i}", prompt, ANSWER) for i, prompt in enumerate(prompts))))
        return process.call(found)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m proof scheduler", allow_abbrev=False, description=__doc__.partition("\n")[0])
    p.add_argument("--block-size", type=int, default=128, help="tokens of a packed page")
    p.add_argument("--models", type=words([*SHAPES]), default=[*SHAPES], metavar="NAME,...", help="of Gemma-3")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            arch, (layers, size, window) = named("Gemma-3"), SHAPES[name]
            heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": size}
            own = {"num_hidden_layers": layers, "sliding_window": window, "max_position_embeddings": LENGTH}
            numbers = {**arch.numbers, **heads, **own}
            path = write_model(replace(arch, name=name, dtype="bfloat16", numbers=numbers), Path(folder) / name)
            for before in (as_packed_ones, None):
                block, groups, ratio, ms = measure(str(path), args.block_size, before)
                rows.append((name, str(block), str(groups), f"{ratio:.2f}", f"{ms:.2f}"))
    head = ("Gemma-3", "tokens of a window's page", "groups", "capacity", "ms per step")
    console.Table(head, rows, 1).show()
    return 0

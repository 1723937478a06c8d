"""Engines with a cache each behind one client, as `vllm serve --data-parallel-size` starts them."""

from __future__ import annotations

import asyncio
from typing import Any

from proof.oracle.trace import Request, Result, Trace


def serve(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Each engine's answers to all traces, as JSON of one `Result`."""
    return [r.to_json() for r in asyncio.run(_serve(job))]


async def _serve(job: dict[str, Any]) -> list[Result]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    fixed = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(job["model"], **fixed, **job["engine"]))
    requests = [r for t in job["traces"] for r in Trace.from_json(t).requests]
    found = []
    for rank in range(job["engine"]["data_parallel_size"]):
        # one after the other, so that the engines do exactly the same steps
        answers = [await _ask(engine, rank, r) for r in requests]
        outputs = {r.name: [tokens] for r, (tokens, _) in zip(requests, answers, strict=True)}
        cached = {r.name: hit for r, (_, hit) in zip(requests, answers, strict=True)}
        found.append(Result(outputs, cached, [], 0, (0, 0)))
    engine.shutdown()
    return found


async def _ask(engine: Any, rank: int, r: Request) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were found in that engine's cache."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=r.max_tokens, temperature=0, ignore_eos=True)
    prompt = {"prompt_token_ids": list(r.prompt)}
    stream = engine.generate(prompt, params, f"{r.name}-{rank}", data_parallel_rank=rank)
    last = [out async for out in stream][-1]
    return list(last.outputs[0].token_ids), last.num_cached_tokens

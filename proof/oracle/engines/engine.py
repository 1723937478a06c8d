"""Runs traces on the real engine, in this process, and writes down what the scheduler did.

The engine is observed, not changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from proof.oracle.adapters import asked_for
from proof.oracle.engines.computed import Computed
from proof.oracle.engines.far import POOL_BYTES, far_ids, hand_out_only, sparse_zeros
from proof.oracle.engines.groups import groups_of
from proof.oracle.engines.shared import SharedPages
from proof.oracle.pictures import prompt_of
from proof.oracle.structured import sampled
from proof.oracle.trace import Chunk, Request, Result, Trace

ENVIRONMENT = {
    # the scheduler must be accessible
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # the models are tiny: threads would only wait for each other, and, where several engines share the cores, spin
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    # vLLM's search for ngrams; numba sets OpenMP's number of threads for the whole process
    "NUMBA_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it vLLM compiles functions of eager models, too (its sampler's, some norms): seconds in each process."""


class TracedEngine:
    def __init__(
        self,
        model: str,
        pool: float | None = None,
        far: bool = False,
        before: Callable[[], None] | None = None,
        **engine: Any,
    ) -> None:
        """`pool`: as many blocks as that many requests of the maximum length need; `far`: of a pool beyond 4 GiB;
        `before` is called in the engine's process, before the engine is made."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for name, value in EAGER.items():
            if engine.get("enforce_eager", True):
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        from vllm import LLM

        if before is not None:
            before()
        defaults = {
            "dtype": "float32",
            "max_model_len": 1024,
            "enforce_eager": True,
            "async_scheduling": False,
            # vLLM writes all of it at start-up
            "kv_cache_memory_bytes": 1 << 28,
        }
        arguments = {**defaults, **engine}
        wanted = 0
        if pool is not None:
            wanted, arguments["num_gpu_blocks_override"] = blocks_for(model, pool, far, arguments)
        self.model = model
        with sparse_zeros() if far else nullcontext():
            self.engine = LLM(model, **arguments).llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        if far:
            pages = next(iter(packed_pools(self.engine)))
            stride = pages.stride(0) * pages.element_size()
            hand_out_only(self.scheduler.kv_cache_manager.block_pool, far_ids(wanted - 1, len(pages), stride))
        self.steps: list[list[Chunk]] = []
        self.shared = SharedPages(self.engine, self.scheduler)
        self.computed = Computed(self.engine)
        layers = self.engine.vllm_config.model_config.get_total_num_hidden_layers()
        self.packed_group, self.beside = groups_of(self.scheduler.kv_cache_config, layers)
        self._observe()

    def _observe(self) -> None:
        schedule = self.scheduler.schedule

        def observed(*args: Any, **kwargs: Any) -> Any:
            out = schedule(*args, **kwargs)
            blocks, chunks = self.scheduler.kv_cache_manager.get_block_ids, self.computed.chunks(out)
            step = []
            for chunk in chunks:
                table = blocks(chunk.request)
                beside = [list(table[group]) for group in self.beside]
                step.append(replace(chunk, pages=list(table[self.packed_group]), beside=beside))
            if step:
                self.steps.append(step)
            self.shared.scheduled(out.num_scheduled_tokens)
            return out

        self.scheduler.schedule = observed

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def run(self, trace: Trace) -> Result:
        from vllm import SamplingParams

        if trace.reset and not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache can't be reset: blocks are still in use")
        before, self.steps = self.free_blocks(), []
        outputs: dict[str, list[list[int]]] = {r.name: [[] for _ in range(r.n)] for r in trace.requests}
        cached: dict[str, int] = {}
        waiting = sorted(trace.requests, key=lambda r: r.arrival)
        aborts = {r.name: r.abort_after for r in trace.requests if r.abort_after is not None}
        aborted: list[str] = []
        changed: list[str] = []
        step = stopped = 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and waiting[0].arrival <= step:
                self._add(waiting.pop(0), SamplingParams)
            done = self.engine.step()
            changed += self.shared.computed()
            for out in done:
                for sample in out.outputs:
                    stopped += sample.finish_reason == "stop"
                    outputs[out.request_id][sample.index] = list(sample.token_ids)
                if out.num_cached_tokens is not None:
                    cached.setdefault(out.request_id, out.num_cached_tokens)
                limit = aborts.get(out.request_id)
                if limit is not None and len(outputs[out.request_id][0]) >= limit and not out.finished:
                    self.engine.abort_request([out.request_id])
                    aborted.append(out.request_id)
                    del aborts[out.request_id]
            step += 1
        free = before, self.free_blocks()
        beside = list(self.beside.values())
        return Result(outputs, cached, self.steps, self._preemptions(), free, aborted, stopped, changed, beside)

    def _add(self, r: Request, sampling: Any) -> None:
        params = sampling(
            max_tokens=r.max_tokens,
            n=r.n,
            temperature=r.temperature,
            seed=r.seed,
            ignore_eos=True,
            stop_token_ids=list(r.stop_token_ids),
            stop=list(r.stop),
            **sampled(r),
        )
        self.engine.add_request(r.name, prompt_of(r), params, priority=r.priority, **asked_for(r, self.model))

    def _preemptions(self) -> int:
        """How often a request was admitted again."""
        admitted = [c.request for step in self.steps for c in step if c.admitted]
        return len(admitted) - len(set(admitted))


def packed_pools(engine: Any) -> list[Any]:
    """The packed pages of each layer of vLLM's engine: (blocks, ...) tensors."""
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer.kv_cache for layer in layers if getattr(getattr(layer, "impl", None), "packed", None) is not None]


def blocks_for(model: str, pool: float, far: bool, arguments: dict[str, Any]) -> tuple[int, int]:
    """How many blocks `pool` requests of the maximum length take, with block 0, which vLLM never hands out; and how
    many a pool beyond 4 GiB has."""
    from vllm import EngineArgs

    from vllm_kvq.integration.plan.plan import plan
    from vllm_kvq.integration.worker.report import Capacity

    served = plan(EngineArgs(model, **arguments).create_engine_config())
    stride = served.pool.block_bytes if served.mixed else int(served.page_bytes)
    per_request = Capacity.of(served, 1).per_request
    # vLLM itself counts one more block for each layer with a window
    least = per_request + sum(kind.layers for kind in served.pool.kinds if kind.apart)
    wanted = 1 + max(least, int(pool * per_request))
    return wanted, -(-POOL_BYTES // stride) if far else wanted

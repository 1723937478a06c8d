"""The cost of a prompt on top of its attention: fit, pack, and the attention of a later chunk over packed history.

One layer, one request, bf16, with the code that serves requests (`kernels.torch.step.PlannedStep`, C++ kernels):

  * prompt: all `context` tokens at once. fit: the request's state (SQuat's subspace, ...). pack: everything else
    that updates the caches. Their shares are relative to the time of vLLM's own CPU attention for the same prompt
    (causal, bf16 cache, its own scheduler); ours is the attention that we run instead.
  * chunk: attention of that many new tokens after `context` tokens, ours against vLLM's.

Rounds are interleaved; shares and ratios are medians over rounds of that round's quotient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.bench import vllm_build
from vllm_kvq.bench.pools import calibrated
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.table import label
from vllm_kvq.kernels.paths import Wish, kernels_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, StepBatch
from vllm_kvq.kernels.torch.plan import StepPlan
from vllm_kvq.kernels.torch.step import Planned, PlannedStep

BLOCK = 128
Options = Mapping[str, Any]


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Plain:
    """vLLM's CPU_ATTN over its bf16 cache: `chunk` queries after `context` tokens."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: int) -> None:
        vllm_build.load()
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        chunk, query_heads, d = query.shape
        heads, total = key.shape[1], context + chunk
        isa = _get_attn_isa(torch.bfloat16, BLOCK, d)
        blocks = -(-total // BLOCK)
        cache = torch.zeros(blocks, heads, 2 * BLOCK, d, dtype=torch.bfloat16)
        k, v = cache.chunk(2, dim=2)
        rest = torch.randn(2, context, heads, d).bfloat16()
        for at, (new_k, new_v) in ((0, rest), (context, (key, value))):
            slots = torch.arange(at, at + len(new_k))
            ops.cpu_attn_reshape_and_cache(new_k.contiguous(), new_v.contiguous(), k, v, slots, isa)
        starts, lengths = torch.tensor([0, chunk], dtype=torch.int32), torch.tensor([total], dtype=torch.int32)
        sizes = (1, query_heads, heads, d)
        plan = ops.cpu_attn_get_scheduler_metadata(*sizes, lengths, torch.bfloat16, starts, True, -1, isa, True)
        table = torch.arange(blocks, dtype=torch.int32)[None]
        self.out = torch.empty_like(query)
        tail = (starts, lengths, d**-0.5, True, None, -1, table, 0.0, plan, None)
        self.attend = lambda: ops.cpu_attention_with_kv_cache(query, k, v, self.out, *tail)


class Packed:
    """One packed layer with the caches of one request."""

    def __init__(self, name: str, heads: int, d: int, tokens: int, options: Options) -> None:
        from vllm_kvq.integration.worker.prompts import Asked, prompts_for

        geometry = Geometry(d, BLOCK, torch.bfloat16)
        fmt, cpu = calibrated(get_format(name).bind(geometry, options), heads), torch.device("cpu")
        slots = SlotGeometry.of(fmt, heads, 0)
        pages = -(-tokens // BLOCK)
        pool = torch.zeros(1 + pages + slots.sidecar_blocks + slots.sink_blocks, slots.page_bytes // 2).bfloat16()
        self.caches = Caches(pool.view(torch.uint8).unflatten(1, (heads, -1)), pool, pool if fmt.S else None)
        kernels, prompts = kernels_for(fmt, Wish("cpu")), prompts_for(Asked(cpu, torch.bfloat16, d, False))
        self.step = PlannedStep(fmt, slots, 0, d**-0.5, cpu, kernels, prompts.causal)
        ids = torch.arange(1, len(pool), dtype=torch.int32)[None]
        self.tables = ids.split([pages, slots.sidecar_blocks, slots.sink_blocks], 1)

    def plan(self, context: int, new: int) -> StepPlan:
        start, end = (torch.tensor(x, dtype=torch.int32) for x in ([0, new], [context + new]))
        pages, sidecar, sinks = self.tables
        batch = StepBatch(start, start, end, pages, sidecar, None if self.caches.sinks is None else sinks, new)
        return self.step.plan(Planned.of(batch), self.caches)

    def forget(self) -> None:
        self.step.slots.headers(self.caches.sidecar).zero_()

    def fit(self, plan: StepPlan, query: torch.Tensor, key: torch.Tensor) -> None:
        slots = self.step.slots.cut(self.caches.sidecar)
        for fit in plan.fits:
            self.step.fit(fit, slots, query, key)

    def update(self, plan: StepPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.step.update(plan, self.caches, query, key, value)[0]

    def attend(self, plan: StepPlan, ring: torch.Tensor, *tensors: torch.Tensor) -> None:
        self.step.attend(plan, self.caches, ring, *tensors)


@dataclass(frozen=True)
class PromptRow:
    """Milliseconds, and what fitting and packing add as shares of vLLM's attention."""

    format: str
    tokens: int
    fit_ms: float
    pack_ms: float
    vllm_ms: float
    ours_ms: float
    fit_share: float
    pack_share: float


@dataclass(frozen=True)
class ChunkRow:
    format: str
    tokens: int
    context: int
    vllm_ms: float
    ours_ms: float
    ratio: float


def prompt_row(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plain: Plain, rounds: int, options: Options
) -> PromptRow:
    packed = Packed(name, k.shape[1], k.shape[2], len(k), options)
    out = torch.empty_like(q)
    times: dict[str, list[float]] = {"vLLM": [], "fit": [], "pack": [], "ours": []}
    for turn in range(rounds + 1):
        packed.forget()
        plan = packed.plan(0, len(q))
        got = {"vLLM": seconds(plain.attend)}
        got["fit"] = seconds(lambda: packed.fit(plan, q, k))  # noqa: B023
        whole = seconds(lambda: packed.update(plan, q, k, v))  # noqa: B023
        got["pack"] = whole - got["fit"]
        ring = packed.step.slots.cut(packed.caches.sidecar)[plan.ring_read]
        got["ours"] = seconds(lambda: packed.attend(plan, ring, q, k, v, out))  # noqa: B023
        for side, took in got.items():
            if turn:
                times[side].append(took)
    ms = {side: 1e3 * statistics.median(t) for side, t in times.items()}
    share = {
        part: statistics.median(t / base for t, base in zip(times[part], times["vLLM"], strict=True))
        for part in ("fit", "pack")
    }
    parts = (ms["fit"], ms["pack"], ms["vLLM"], ms["ours"], share["fit"], share["pack"])
    return PromptRow(label(name, options), len(q), *parts)


def chunk_row(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: int,
    plain: Plain,
    rounds: int,
    options: Options,
) -> ChunkRow:
    heads, d = k.shape[1:]
    packed = Packed(name, heads, d, context + len(q), options)
    out = torch.empty_like(q)
    for at in range(0, context, 4096):
        n = min(4096, context - at)
        query, (key, value) = torch.randn(n, q.shape[1], d).bfloat16(), torch.randn(2, n, heads, d).bfloat16()
        packed.update(packed.plan(at, n), query, key, value)
    plan = packed.plan(context, len(q))
    ring = packed.update(plan, q, k, v)
    ours, theirs = [], []
    for turn in range(rounds + 1):
        a, b = seconds(plain.attend), seconds(lambda: packed.attend(plan, ring, q, k, v, out))
        if turn:
            theirs.append(a)
            ours.append(b)
    ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
    return ChunkRow(
        label(name, options), len(q), context, 1e3 * statistics.median(theirs), 1e3 * statistics.median(ours), ratio
    )

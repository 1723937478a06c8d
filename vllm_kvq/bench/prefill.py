"""The cost of a prompt on top of its attention: fit, pack, and the attention of a later chunk over packed history.

    python -m vllm_kvq bench prefill --formats all --context 4096

One layer, one request, bf16, with the code that serves requests (`kernels.torch.step.PlannedStep`, C++ kernels):

  * prompt: all `--context` tokens at once. fit: the request's state (SQuat's subspace, ...). pack: everything else
    that updates the caches. Their shares are relative to the time of vLLM's own CPU attention for the same prompt
    (causal, bf16 cache, its own scheduler); ours is the attention that we run instead.
  * chunk (with `--chunk`): attention of that many new tokens after `--context` tokens, ours against vLLM's.

Rounds are interleaved, shares and ratios are medians over rounds of that round's quotient.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from vllm_kvq import console
from vllm_kvq.bench import vllm_build
from vllm_kvq.bench.names import add_formats
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.rope import Rope
from vllm_kvq.kernels.paths import Wish, kernels_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, StepBatch
from vllm_kvq.kernels.torch.plan import StepPlan
from vllm_kvq.kernels.torch.step import Planned, PlannedStep

BLOCK = 128


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

    def __init__(self, name: str, heads: int, d: int, tokens: int) -> None:
        from vllm_kvq.integration.worker.prompts import Asked, prompts_for

        geometry = Geometry(d, BLOCK, torch.bfloat16, rope=Rope.plain(d, tokens))
        fmt, cpu = get_format(name).bind(geometry), torch.device("cpu")
        slots = SlotGeometry.of(fmt, heads, 0)
        pages = -(-tokens // BLOCK)
        pool = torch.zeros(1 + pages + slots.sidecar_blocks + slots.sink_blocks, slots.page_bytes // 2).bfloat16()
        self.caches = Caches(pool.view(torch.uint8).unflatten(1, (heads, -1)), pool, pool if fmt.S else None)
        kernels, causal = kernels_for(fmt, Wish("cpu")), prompts_for(Asked(cpu, torch.bfloat16, d, False))
        self.step = PlannedStep(fmt, slots, 0, d**-0.5, cpu, kernels, causal)
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
    fit_ms: float
    pack_ms: float
    vllm_ms: float
    ours_ms: float
    fit_share: float
    pack_share: float

    def __str__(self) -> str:
        return (
            f"{self.format:9} fit {self.fit_ms:7.1f} ms  pack {self.pack_ms:7.1f} ms  "
            f"attention: vLLM {self.vllm_ms:7.1f} ms, ours {self.ours_ms:7.1f} ms   "
            f"fit {self.fit_share:6.1%} + pack {self.pack_share:6.1%} of vLLM's"
        )


@dataclass(frozen=True)
class ChunkRow:
    format: str
    tokens: int
    context: int
    vllm_ms: float
    ours_ms: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.format:9} chunk of {self.tokens} after {self.context}: vLLM {self.vllm_ms:7.1f} ms, "
            f"ours {self.ours_ms:7.1f} ms   {self.ratio:5.2f} times vLLM's speed"
        )


def prompt_row(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plain: Plain, rounds: int) -> PromptRow:
    packed = Packed(name, k.shape[1], k.shape[2], len(k))
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
        for label, took in got.items():
            if turn:
                times[label].append(took)
    ms = {label: 1e3 * statistics.median(t) for label, t in times.items()}
    share = {
        label: statistics.median(t / base for t, base in zip(times[label], times["vLLM"], strict=True))
        for label in ("fit", "pack")
    }
    return PromptRow(name, ms["fit"], ms["pack"], ms["vLLM"], ms["ours"], share["fit"], share["pack"])


def chunk_row(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: int, plain: Plain, rounds: int
) -> ChunkRow:
    heads, d = k.shape[1:]
    packed = Packed(name, heads, d, context + len(q))
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
    return ChunkRow(name, len(q), context, 1e3 * statistics.median(theirs), 1e3 * statistics.median(ours), ratio)


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench prefill",
        "The cost of a prompt on top of its attention: fit, pack, and a later chunk's attention over packed history.",
        ("--formats all --context 4096", "--formats kitty2 --context 4096 --chunk 512 --json"),
        "could not be done",
    )
    add_formats(p)
    p.add_argument("--context", nargs="+", type=int, default=[4096])
    p.add_argument(
        "--chunk", type=int, default=0, help="tokens of the chunks to measure instead of prompts (0: prompts)"
    )
    p.add_argument("--query-heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=8)
    p.add_argument("--head-size", type=int, default=128)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--rounds", type=int, default=3)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if min(*args.context, args.query_heads, args.kv_heads, args.threads, args.rounds, args.chunk + 1) < 1:
        p.error("contexts, heads, threads and rounds must be at least 1, chunks at least 0")
    if args.query_heads % args.kv_heads:
        p.error(f"{args.query_heads} query heads can't share {args.kv_heads} KV heads evenly")
    try:
        Geometry(args.head_size, BLOCK)
    except ValueError as error:
        p.error(str(error))
    torch.set_num_threads(args.threads)
    if not args.json:
        print(f"heads {args.query_heads}/{args.kv_heads}  d {args.head_size}  threads {args.threads}")
    rows: list[PromptRow | ChunkRow] = []
    for context in args.context:
        new = args.chunk or context
        q = torch.randn(new, args.query_heads, args.head_size).bfloat16()
        k, v = torch.randn(2, new, args.kv_heads, args.head_size).bfloat16()
        plain = Plain(q, k, v, context if args.chunk else 0)
        for name in args.formats:
            if args.chunk:
                rows.append(chunk_row(name, q, k, v, context, plain, args.rounds))
            else:
                rows.append(prompt_row(name, q, k, v, plain, args.rounds))
            if not args.json:
                print(rows[-1], flush=True)
    if args.json:
        shape = {"query_heads": args.query_heads, "kv_heads": args.kv_heads, "head_size": args.head_size}
        console.show_json({**shape, "threads": args.threads, "rows": [asdict(row) for row in rows]})
    return console.DONE


if __name__ == "__main__":
    raise SystemExit(main())

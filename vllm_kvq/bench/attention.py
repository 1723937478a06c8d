"""Decode attention over packed pages, side by side with vLLM's own CPU attention in one process.

    python -m vllm_kvq.bench.attention --format squat2 --context 32768 --threads 2

Rules, so that the ratios mean something:

  * One step is one layer's attention of `--batch` requests over `--context` tokens each, all of them packed:
    vLLM reads its bf16 or fp8 cache through its kernel and block table, we ours through
    `kernels.cpu.attend_packed`.
  * Rounds are interleaved (bf16, fp8, ours, bf16, ...), and a ratio is the median over rounds of that round's
    ratio, so that a slow moment of the machine hits all sides alike.
  * Every timing follows an untimed step of the same kernel. `--rotate n` cycles through n caches instead, as
    the layers of a model do: with one, small contexts stay in the processor's cache.
  * Where `best` is far below `ms`, other processes had the processor: such a run says nothing.
  * Pages hold packed random data with outlier channels and tokens, in shuffled order.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_kvq.formats import FORMATS, Geometry, PageFormat, get_format
from vllm_kvq.kernels import cpu

Step = Callable[[], object]
BASELINES = {"bf16": "auto", "fp8": "fp8"}
PACKED_TOKENS = 1024
"""Different tokens per head that are packed; the pool repeats them, for packing takes long."""


@dataclass(frozen=True)
class Shape:
    context: int
    batch: int
    query_heads: int
    heads: int
    head_size: int
    block_size: int
    rotate: int

    @property
    def pages(self) -> int:
        return -(-self.context // self.block_size)


def vllm_steps(shape: Shape, cache_dtype: str) -> tuple[list[Step], int]:
    """vLLM's CPU_ATTN decoding a cache of `cache_dtype`: a step per rotated cache, and the bytes it reads."""
    import vllm._C  # noqa: F401  registers the operators
    from vllm import _custom_ops as ops

    block, d, heads = 128, shape.head_size, shape.heads
    blocks = shape.batch * -(-shape.context // block)
    query = torch.randn(shape.batch, shape.query_heads, d, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32)
    sizes = (shape.batch, shape.query_heads, heads, d)
    plan = ops.cpu_attn_get_scheduler_metadata(
        *sizes, lengths, torch.bfloat16, starts, True, -1, "vec", True, None, cache_dtype
    )
    steps: list[Step] = []
    for _ in range(shape.rotate):
        if cache_dtype == "auto":
            cache = torch.randn(blocks, heads, block * 2, d).bfloat16()
        else:
            cache = torch.randint(0, 100, (blocks, heads, block * 2, d), dtype=torch.uint8)
        key, value = cache.chunk(2, dim=2)
        table = torch.randperm(blocks, dtype=torch.int32).view(shape.batch, -1)

        def step(key: torch.Tensor = key, value: torch.Tensor = value, table: torch.Tensor = table) -> object:
            return ops.cpu_attention_with_kv_cache(
                *(query, key, value, out, starts, lengths, d**-0.5, True, None, -1, table, 0.0, plan),
                *(None, None, 1.0, 1.0, cache_dtype),
            )

        steps.append(step)
    return steps, cache.nbytes


def packed_pool(fmt: PageFormat, pages: int, heads: int) -> torch.Tensor:
    """`pages` records per head of random data: keys with outlier channels, values with outlier tokens."""
    d = fmt.geometry.head_size
    some = max(1, PACKED_TOKENS // fmt.N)
    key, value = torch.randn(heads, some * fmt.N, d), torch.randn(heads, some * fmt.N, d)
    channels = torch.randperm(d)[: max(2, d // 24)]
    key[..., channels] = key[..., channels] * 6 + 8 * torch.randn(heads, 1, len(channels))
    value[:, torch.rand(some * fmt.N) < 0.03] *= 30
    state = None
    if fmt.state_rows:
        state = fmt.keys.fit(fmt.widen(torch.randn(heads, 256, d))[0], fmt.widen(key)[0], None)
    units = fmt.N // fmt.unit
    k, v = (fmt.widen(x)[0].unflatten(1, (some * units, fmt.unit)).transpose(0, 1).flatten(0, 1) for x in (key, value))
    index = torch.arange(some * units)
    packed = torch.zeros(some, heads, fmt.record_bytes, dtype=torch.uint8)
    repeated = None if state is None else state.repeat(some * units, 1, 1)
    fmt.write(packed, index // units, index % units, fmt.encode(k, v, repeated))
    return packed.repeat(-(-pages // some), 1, 1)[:pages].contiguous()


def kvq_steps(shape: Shape, name: str) -> tuple[list[Step], int]:
    fmt = get_format(name).bind(Geometry(shape.head_size, shape.block_size, torch.bfloat16))
    total = shape.batch * shape.pages
    query = torch.randn(shape.batch, 1, shape.query_heads, shape.head_size, dtype=torch.bfloat16)
    owner = torch.arange(shape.batch).repeat_interleave(shape.pages)
    low = torch.zeros(total, dtype=torch.int64)
    start = torch.arange(shape.pages).repeat(shape.batch) * shape.block_size
    high = (shape.context - start).clamp_max(shape.block_size)
    steps: list[Step] = []
    for _ in range(shape.rotate):
        pool, ids = packed_pool(fmt, total, shape.heads), torch.randperm(total)

        def step(pool: torch.Tensor = pool, ids: torch.Tensor = ids) -> object:
            return cpu.attend_packed(fmt, query, pool, ids, owner, low, high, shape.head_size**-0.5)

        steps.append(step)
    return steps, pool.nbytes


def seconds_per_step(steps: list[Step], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        for step in steps:
            step()
    return (time.perf_counter() - begin) / repeats / len(steps)


def compare(candidates: dict[str, tuple[list[Step], int]], rounds: int) -> list[dict[str, float | str]]:
    """One row per candidate: milliseconds per step (median, best), GB/s, ratios against the baselines."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    repeats = {}
    for name, (steps, _) in candidates.items():
        seconds_per_step(steps, 1)
        repeats[name] = max(1, int(2e-3 / seconds_per_step(steps, 1) / len(steps)))
    for _ in range(rounds):
        for name, (steps, _) in candidates.items():
            if len(steps) == 1:
                steps[0]()
            times[name].append(seconds_per_step(steps, repeats[name]))
    rows: list[dict[str, float | str]] = []
    for name, (_, nbytes) in candidates.items():
        row: dict[str, float | str] = {"kernel": name, "ms": statistics.median(times[name]) * 1e3}
        row["best"] = min(times[name]) * 1e3
        row["GB/s"] = nbytes / statistics.median(times[name]) / 1e9
        for base in BASELINES:
            if base in times:
                row[f"x {base}"] = statistics.median(b / t for b, t in zip(times[base], times[name], strict=True))
        rows.append(row)
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="vllm_kvq.bench.attention", description=__doc__.partition("\n")[0])
    public = [f.name for f in FORMATS.values() if f.public]
    p.add_argument("--format", nargs="+", default=["squat2"], choices=[*public, "all"])
    p.add_argument("--context", nargs="+", type=int, default=[32768])
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--query-heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=8)
    p.add_argument("--head-size", type=int, default=128)
    p.add_argument("--block-size", type=int, default=128, help="tokens per page of ours (vLLM's own is 128)")
    p.add_argument("--rotate", type=int, default=1, help="caches cycled through, as a model's layers are")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--no-baseline", action="store_true", help="ours alone, without vllm")
    p.add_argument("--csv", type=Path, help="append the rows to this file")
    args = p.parse_args(arguments)
    args.format = public if "all" in args.format else args.format
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    if cpu.library() is None:
        print("no C++ kernels here (see the warning above): nothing to measure", file=sys.stderr)
        return 1
    for context in args.context:
        shape = Shape(
            context, args.batch, args.query_heads, args.kv_heads, args.head_size, args.block_size, args.rotate
        )
        candidates = {} if args.no_baseline else {n: vllm_steps(shape, dtype) for n, dtype in BASELINES.items()}
        candidates |= {name: kvq_steps(shape, name) for name in args.format}
        rows = compare(candidates, args.rounds)
        print(
            f"context {context}  batch {args.batch}  heads {args.query_heads}/{args.kv_heads}  "
            f"d {args.head_size}  threads {args.threads}  caches {args.rotate}  {cpu.ISAS[cpu.isa()]}"
        )
        for row in rows:
            print("  " + "  ".join(f"{k} {v:8.3f}" if isinstance(v, float) else f"{v:8}" for k, v in row.items()))
        if args.csv:
            write_csv(args.csv, shape, args.threads, rows)
    return 0


def write_csv(path: Path, shape: Shape, threads: int, rows: list[dict[str, float | str]]) -> None:
    fixed = {**vars(shape), "threads": threads, "isa": cpu.ISAS[cpu.isa()]}
    new = not path.exists()
    with path.open("a", newline="") as f:
        writer = csv.DictWriter(f, [*fixed, *rows[0]])
        if new:
            writer.writeheader()
        writer.writerows({**fixed, **row} for row in rows)


if __name__ == "__main__":
    sys.exit(main())

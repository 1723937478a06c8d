"""Decode attention over packed pages, side by side with vLLM's own CPU attention in one process.

    python -m vllm_kvq bench attention --format squat2 --context 32768 --threads 2

Rules that make the ratios meaningful:

  * One step is one layer's attention of `--batch` requests with `--context` tokens each: vLLM reads its bf16 or fp8
    cache; we read packed pages, window and sinks, and merge (bench/steps.py).
  * Rounds are interleaved (bf16, fp8, ours, bf16, ...), and a ratio is the median over rounds of that round's
    ratio, so a slow moment of the machine affects all sides alike.
  * Every timing follows an untimed step of the same kernel. `--rotate n` cycles through n caches instead, as
    the layers of a model do: with one, small contexts stay in the processor's cache.
  * If `best` is far below `ms`, other processes were using the processor: such a run says nothing.
  * Pages hold packed random data with outlier channels and tokens, in shuffled order.
  * $VLLM_KVQ_ISA=avx2 limits both sides to AVX2: ours, and vLLM's own build for it, which has no fp8 cache.
  * `x copy`: the time relative to a plain copy of the cache's bytes, measured in the same run with the same threads.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_kvq import console
from vllm_kvq.bench import figures
from vllm_kvq.bench.figures import Measured
from vllm_kvq.bench.steps import Candidate, Shape, bound_format, kvq_candidate, vllm_candidate
from vllm_kvq.bench.timing import Row, compare, copy_bandwidth, slopes
from vllm_kvq.bench.vllm_build import BASELINES, baselines, no_fp8
from vllm_kvq.formats.table import suite
from vllm_kvq.kernels.cpu.library import ISAS, isa, library
from vllm_kvq.kernels.cpu.processor import processor_name
from vllm_kvq.kernels.cpu.slow import slow
from vllm_kvq.kernels.cpu.step import why_not

TARGETS = {
    "squat2": (8.0, 5.0),
    "kivi2": (8.0, 5.0),
    "innerq2": (8.0, 5.0),
    "qjl3": (8.5, 5.5),
    "polar4": (6.5, 4.3),
    "polar3": (6.0, 4.0),
}
"""The speedup over vLLM's bf16 and fp8 that a kernel must reach from 32k tokens on (or 8 requests of 4k), on two
threads of a processor with VNNI."""
AVX2_TARGET = 2.5
"""The same on AVX2, against vLLM's own build for it."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench attention",
        "Decode attention over packed pages, side by side with vLLM's own CPU attention in one process.",
        ("", "--format all --context 1024 32768 --threads 2", "--format squat2 --no-baseline --json"),
        "there are no C++ kernels here to measure",
    )
    p.add_argument("--format", nargs="+", default=[*suite("usual")[:1]], choices=[*suite("public"), "all"])
    p.add_argument("--context", nargs="+", type=int, default=[32768], help="tokens in the cache, per request")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--query-heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=8)
    p.add_argument("--head-size", type=int, default=128)
    p.add_argument("--block-size", type=int, default=128, help="tokens per page of our formats (vLLM's own cache: 128)")
    p.add_argument("--rotate", type=int, default=1, help="number of caches to cycle through, like a model's layers")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--no-baseline", action="store_true", help="measure only our formats, without vllm")
    p.add_argument("--csv", type=Path, help="file for the rows")
    p.add_argument("--plot", type=Path, help="PNG file for a plot of time against context")
    console.add_json(p)
    return p


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(arguments)
    args.format = [*suite("public")] if "all" in args.format else args.format
    args.context = sorted(set(args.context))
    try:
        for name in args.format:
            bound_format(shape_of(args, args.context[0]), name)
    except ValueError as error:
        p.error(str(error))
    if min(args.threads, args.rounds) < 1:
        p.error("threads and rounds must be at least 1")
    if not args.no_baseline and importlib.util.find_spec("vllm") is None:
        p.error("vllm is not installed; --no-baseline times only our formats")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        p.error("--plot needs matplotlib: pip install 'vllm-kvq[bench]'")
    return args


def shape_of(args: argparse.Namespace, context: int) -> Shape:
    return Shape(context, args.batch, args.query_heads, args.kv_heads, args.head_size, args.block_size, args.rotate)


def owed_by(name: str, isa: str) -> dict[str, float]:
    """The target ratios against vLLM's caches for a format's kernel, if there are any."""
    if name not in TARGETS or isa not in ("avx2", "avx512"):
        return {}
    return {"bf16": AVX2_TARGET} if isa == "avx2" else dict(zip(BASELINES, TARGETS[name], strict=True))


HEAD = ("kernel", "ms", "best", "GB/s", "x copy", "x bf16", "x fp8", "target")


def cells(row: Row, targets: bool) -> list[str]:
    text = [row.name, f"{row.ms:.3f}", f"{row.best:.3f}", f"{row.gb_per_s:.1f}", f"{row.floor:.1f}"]
    text += [f"{row.ratio[base]:.2f}" if base in row.ratio else "" for base in BASELINES]
    owed = owed_by(row.name, ISAS[isa()])
    if not (targets and owed and row.ratio):
        return [*text, ""]
    missed = [f"{1 - row.ratio[b] / t:.0%} below {t:g} x {b}" for b, t in owed.items() if row.ratio[b] < t]
    return [*text, ", ".join(missed) or "target met"]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    if library() is None:
        print("no C++ kernels here (see the warning above): nothing to measure", file=sys.stderr)
        return console.FOUND
    name = ISAS[isa()]
    bandwidth = copy_bandwidth()
    notes = [
        f"{processor_name()}, {name}, {args.threads} threads, "
        f"copying memory {bandwidth / 1e9:.0f} GB/s (read and written)"
    ]
    for format_name in args.format:
        fmt = bound_format(shape_of(args, args.context[0]), format_name)
        if problem := why_not(fmt):
            notes.append(f"{problem}: the PyTorch kernels are timed")
        elif sentence := slow(fmt):
            notes.append(sentence)
    if not args.no_baseline and (problem := no_fp8(args.head_size)):
        notes.append(f"{problem}: ours is compared only with bf16")
    if not args.json:
        print(*notes, sep="\n", flush=True)
    measured: Measured = []
    for context in args.context:
        shape = shape_of(args, context)
        candidates: dict[str, Candidate] = {}
        if not args.no_baseline:
            candidates = {n: vllm_candidate(shape, dtype) for n, dtype in baselines(args.head_size).items()}
        candidates |= {n: kvq_candidate(shape, n) for n in args.format}
        rows = compare(candidates, args.rounds, bandwidth)
        measured.append((shape, rows))
        if not args.json:
            title = (
                f"context {context}  batch {args.batch}  heads {args.query_heads}/{args.kv_heads}  "
                f"d {args.head_size}  caches {args.rotate}"
            )
            console.Table(HEAD, [cells(row, args.batch * context >= 32768) for row in rows], 1, title, 2).show()
    records = figures.records(measured, args.threads, name)
    if args.json:
        console.show_json({"notes": notes, "rows": records})
    else:
        print_slopes(measured)
    if args.csv:
        figures.write_csv(args.csv, records)
    if args.plot:
        heads = f"{args.query_heads}/{args.kv_heads} heads, d = {args.head_size}, batch {args.batch}"
        figures.plot(args.plot, measured, f"{heads}, {args.threads} thread(s), {name}")
    return console.DONE


def print_slopes(measured: Measured) -> None:
    for name in [row.name for row in measured[0][1]]:
        times = {shape.context: row.ms for shape, rows in measured for row in rows if row.name == name}
        shares = slopes(times)
        if shares:
            text = ", ".join(f"{share:.2f}" for share in shares)
            print(f"  {name:8} cost of a further token between the contexts from 4k on, 1.00 is linear: {text}")


if __name__ == "__main__":
    sys.exit(main())

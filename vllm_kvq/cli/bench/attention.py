"""`vllm-kvq bench attention`: decode attention over packed pages and vLLM's own, side by side in one process."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_kvq import console
from vllm_kvq.bench import attention, figures, vllm_build
from vllm_kvq.bench.figures import Measured
from vllm_kvq.bench.steps import Shape, bound_format
from vllm_kvq.bench.timing import Row, copy_bandwidth, slopes
from vllm_kvq.cli.arguments import add_context, add_formats, add_out, from_zero, whole_number
from vllm_kvq.cli.bench.arguments import OWN, add_batch, add_rounds, add_shape, add_threads, check_memory, recommended
from vllm_kvq.cli.bench.report import Report
from vllm_kvq.kernels.cpu.library import ISAS, isa, library
from vllm_kvq.kernels.cpu.processor import last_level_cache, processor_name

PROG = "vllm-kvq bench attention"
REPORT = Report(
    PROG,
    "cpu-attention",
    "One layer's attention in a decode step, over packed pages and by vLLM itself, in one process.",
    "Time against context",
    (
        "ms and best: the median and the fastest round. MB: what a step reads. GB/s, and of copy: at what speed, and "
        "what share of a memory copy's speed that is.",
        "x bf16, x fp8: how many times as fast as vLLM's caches. limit: the same if only the bytes counted.",
    ),
)
ROTATE = """caches to read in turn, as the layers of a model do (1: one cache, which may stay in the processor's
last-level cache; default: 0, enough to exceed it twice over)"""


def caches(rotate: int) -> str:
    return f"caches {rotate}" if rotate else f"caches exceed twice the processor's {last_level_cache() >> 20} MiB"


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Decode attention over packed pages, side by side with vLLM's own CPU attention in one process.\n"
        "Takes minutes with several formats or long contexts.",
        ("", "--formats all --context 1024,32768 --threads 2", "--formats klt3,kitty2 --no-baseline --json"),
        "there are no C++ kernels here to measure",
    )
    add_formats(p, recommended(), OWN)
    add_context(p, "32768", "per request", several=True)
    add_batch(p, "1")
    add_threads(p)
    add_shape(p)
    p.add_argument("--block-size", type=whole_number, default=128, metavar="N", help="tokens per page of our formats")
    p.add_argument("--rotate", metavar="CACHES", type=from_zero, default=0, help=" ".join(ROTATE.split()))
    add_rounds(p, 9)
    p.add_argument("--no-baseline", action="store_true", help="measure only our formats, without vllm")
    add_out(p, REPORT.files)
    console.add_json(p)
    return p


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(arguments)
    args.context = sorted(set(args.context))
    try:
        shape = shape_of(args, args.context[-1])
    except ValueError as error:
        p.error(str(error))
    check_memory(p, shape.context, shape.plain_bytes // shape.context)
    try:
        for choice in args.formats:
            bound_format(shape_of(args, args.context[0]), choice.format, choice.options)
    except ValueError as error:
        p.error(str(error))
    if not args.no_baseline and importlib.util.find_spec("vllm") is None:
        p.error("vllm is not installed; --no-baseline times only our formats")
    return args


def shape_of(args: argparse.Namespace, context: int) -> Shape:
    return Shape(context, args.batch, args.query_heads, args.kv_heads, args.head_size, args.block_size, args.rotate)


HEAD = ("kernel", "ms", "best", "MB", "GB/s", "of copy", "x bf16", "limit", "x fp8")


def cells(row: Row) -> list[str]:
    text = [row.name, f"{row.ms:.3f}", f"{row.best:.3f}", f"{row.nbytes / 1e6:.1f}", f"{row.gb_per_s:.1f}"]
    text += [f"{1 / row.floor:.0%}", *(f"{by[base]:.2f}" if base in by else "" for base, by in (
        ("bf16", row.ratio), ("bf16", row.limit), ("fp8", row.ratio)))]  # fmt: skip
    return text


def heads_of(args: argparse.Namespace) -> str:
    return f"{args.query_heads}/{args.kv_heads} heads, d = {args.head_size}"


def table(args: argparse.Namespace, shape: Shape, rows: Sequence[Row]) -> console.Table:
    title = (
        f"context {shape.context}  batch {args.batch}  heads {args.query_heads}/{args.kv_heads}  "
        f"d {args.head_size}  {caches(args.rotate)}"
    )
    return console.Table(HEAD, [cells(row) for row in rows], 1, title, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    if library() is None:
        why = "there are no C++ kernels here to measure; vllm-kvq doctor says what is missing"
        return console.fail(PROG, why, args.json)
    name, baseline = ISAS[isa()], not args.no_baseline
    if baseline and (why_not := vllm_build.why_not()):
        return console.fail(PROG, why_not, args.json)
    bandwidth = copy_bandwidth()
    notes = [
        f"{processor_name()}, {name}, {args.threads} threads, "
        f"copying memory {bandwidth / 1e9:.0f} GB/s (read and written)"
    ]
    formats = [(c.format, c.options) for c in args.formats]
    shapes = [shape_of(args, context) for context in args.context]
    notes += attention.notes(shapes[0], formats, baseline)
    if not args.json:
        print(*notes, sep="\n", flush=True)
    measured: Measured = []
    for shape, rows in attention.measure(shapes, formats, args.rounds, bandwidth, baseline):
        measured.append((shape, rows))
        if not args.json:
            table(args, shape, rows).show()
    records = figures.records(measured, args.threads, name)
    if args.json:
        console.show_json({"notes": notes, "rows": records})
    else:
        for line in slope_lines(measured):
            print(f"  {line}")
    if args.out:
        title = f"{heads_of(args)}, batch {args.batch}, {args.threads} thread(s), {name}"
        about = f"batch {args.batch}, {heads_of(args)}, {caches(args.rotate)}"
        tables = [replace(table(args, s, rows), title=f"{s.context:,} tokens: {about}") for s, rows in measured]
        facts = [("threads", str(args.threads)), ("instruction set", name)]
        notes += slope_lines(measured)
        REPORT.write(
            args.out, records, lambda path: figures.plot(path, measured, title), tables, notes, arguments, facts
        )
    return console.DONE


def slope_lines(measured: Measured) -> list[str]:
    lines = []
    for name in [row.name for row in measured[0][1]]:
        times = {shape.context: row.ms for shape, rows in measured for row in rows if row.name == name}
        if shares := slopes(times):
            text = ", ".join(f"{share:.2f}" for share in shares)
            lines.append(f"{name:8} cost per extra token from 4k on (1.00 = linear): {text}")
    return lines

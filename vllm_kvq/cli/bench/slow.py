"""`vllm-kvq bench slow`: cases in which a format may be slow on the CPU, as the tables of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from vllm_kvq import console
from vllm_kvq.bench import figures, slow, vllm_build
from vllm_kvq.bench.figures import Curves
from vllm_kvq.bench.timing import Row
from vllm_kvq.cli.arguments import add_context, add_out
from vllm_kvq.cli.bench.arguments import add_rounds, add_threads, check_memory
from vllm_kvq.cli.bench.report import Report
from vllm_kvq.console import Table
from vllm_kvq.drawing import Picture
from vllm_kvq.formats.table import public_formats
from vllm_kvq.kernels.cpu.library import ISAS, isa, library
from vllm_kvq.kernels.cpu.processor import processor_name

PROG = "vllm-kvq bench slow"
REPORT = Report(
    PROG,
    "slow",
    "One layer's attention in a decode step with head sizes that are no power of two, and with options that the fast "
    "CPU kernels do not serve, next to vLLM's attention over its bf16 cache.",
    "Speed against bf16",
    ("Figures are medians of the rounds' ratios, how many times as fast as bf16; and of options, how many times as "
     "much time as without them.",),
)  # fmt: skip
ByHead = Mapping[int, Sequence[Row]]


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Head sizes that are no power of two, and options that the fast CPU kernels do not serve, timed against\n"
        "vLLM's bf16 cache, in Markdown.\n"
        "Takes minutes.",
        ("", "--context 8192 --threads 1 --rounds 9"),
        "there are no C++ kernels here to measure",
    )
    add_context(p, "8192", "of the request")
    add_threads(p, 1)
    add_rounds(p, 9)
    add_out(p, REPORT.files)
    console.add_json(p)
    return p


def markdown(table: Table) -> str:
    """Columns of words are set as code."""
    rows = [[*(f"`{cell}`" for cell in row[: table.right]), *row[table.right :]] for row in table.rows]
    lines = [table.head, ["---"] * len(table.head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def head_table(by_head: ByHead) -> Table:
    """The speed relative to bf16, with a column for each head size."""
    names = [row.name for row in next(iter(by_head.values())) if row.name != "bf16"]
    ratios = {d: {row.name: row.ratio["bf16"] for row in rows} for d, rows in by_head.items()}
    rows = [[name, *(f"{ratios[d][name]:.2f}" for d in by_head)] for name in names]
    return Table(["times bf16", *(f"d = {d}" for d in by_head)], rows, title="Head sizes")


def option_table(rows: Sequence[Row]) -> Table:
    """Each variant's speed, relative to bf16 and to the same format without the option."""
    by_name = {row.name: row for row in rows}
    lines = []
    for name, options in slow.OPTIONS:
        row, default = by_name[slow.label(name, options)], by_name[name]
        given = ", ".join(f"{key}: {value}" for key, value in options.items())
        lines.append([name, given, f"{row.ratio['bf16']:.2f}", f"{row.ms / default.ms:.1f}"])
    head = ["format", "option", "times bf16", "times slower than its defaults"]
    return Table(head, lines, 2, f"Options: d = {slow.USUAL_HEAD}")


def plot(path: Path, by_head: ByHead, variants: Sequence[Row], context: int, title: str) -> Picture:
    panels: dict[str, Curves] = {
        f"d = {d}{', without and with options' if rows is variants else ''}": {
            row.name: [(context, row.ratio["bf16"])] for row in rows if row.name != "bf16"
        }
        for d, rows in (*by_head.items(), (slow.USUAL_HEAD, variants))
    }
    return figures.draw(path, panels, title, figures.times("bf16"))


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        p.error("vllm is not installed, so there is nothing to compare with")
    check_memory(p, args.context, 4 * slow.KV_HEADS * max(slow.HEAD_SIZES))
    torch.set_num_threads(args.threads)
    if library() is None:
        why = "there are no C++ kernels here to measure; vllm-kvq doctor says what is missing"
        return console.fail(PROG, why, args.json)
    if why_not := vllm_build.why_not():
        return console.fail(PROG, why_not, args.json)
    public: slow.Wanted = [(fmt.name, {}) for fmt in public_formats()]
    by_head = {d: slow.measure(args.context, args.rounds, d, public) for d in slow.HEAD_SIZES}
    defaults: slow.Wanted = [(name, {}) for name in dict.fromkeys(name for name, _ in slow.OPTIONS)]
    variants = slow.measure(args.context, args.rounds, slow.USUAL_HEAD, [*defaults, *slow.OPTIONS])
    where = {"processor": processor_name(), "isa": ISAS[isa()], "threads": args.threads, "context": args.context}
    measured = [(d, row) for d, rows in (*by_head.items(), (slow.USUAL_HEAD, variants)) for row in rows]
    records = [{"head_size": d, "kernel": r.name, "ms": r.ms, "times_bf16": r.ratio["bf16"]} for d, r in measured]
    heads, options = head_table(by_head), option_table(variants)
    said = f"{slow.QUERY_HEADS} query and {slow.KV_HEADS} KV heads, {args.context} tokens, {args.threads} thread(s)"
    if args.out:
        title = f"Head sizes that are no power of two, and options without fast kernels\n{said}"
        facts = [("shape", said), ("instruction set", where["isa"])]
        REPORT.write(
            args.out,
            records,
            lambda path: plot(path, by_head, variants, args.context, title),
            [heads, options],
            [],
            arguments,
            facts,
        )
    if args.json:
        console.show_json({**where, "rows": records})
        return console.DONE
    print(
        f"{said}, {where['processor']} ({where['isa']}):\n\n{markdown(heads)}\n\n"
        f"Options, d = {slow.USUAL_HEAD}:\n\n{markdown(options)}"
    )
    return console.DONE

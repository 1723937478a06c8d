"""`vllm-kvq bench slow`: cases in which a format is slow on the CPU, as the Markdown tables of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence

import torch

from vllm_kvq import console
from vllm_kvq.bench import slow, vllm_build
from vllm_kvq.bench.timing import Row
from vllm_kvq.cli.arguments import add_context
from vllm_kvq.cli.bench.arguments import add_rounds, add_threads, check_memory
from vllm_kvq.formats.table import public_formats
from vllm_kvq.kernels.cpu.library import ISAS, isa, library
from vllm_kvq.kernels.cpu.processor import processor_name


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench slow",
        "Head sizes and options that the fast CPU kernels do not serve, timed against vLLM's bf16 cache, in Markdown.\n"
        "Takes minutes.",
        ("", "--context 8192 --threads 1 --rounds 9"),
        "there are no C++ kernels here to measure",
    )
    add_context(p, "8192", "of the request")
    add_threads(p, 1)
    add_rounds(p, 9)
    console.add_json(p)
    return p


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def head_table(by_head: Mapping[int, Sequence[Row]]) -> str:
    """The speed relative to bf16, with a column for each head size."""
    names = [row.name for row in next(iter(by_head.values())) if row.name != "bf16"]
    ratios = {d: {row.name: row.ratio["bf16"] for row in rows} for d, rows in by_head.items()}
    rows = [[f"`{name}`", *(f"{ratios[d][name]:.2f}" for d in by_head)] for name in names]
    return markdown(["times bf16", *(f"d = {d}" for d in by_head)], rows)


def option_table(rows: Sequence[Row]) -> str:
    """Each variant's speed, relative to bf16 and to the same format without the option."""
    by_name = {row.name: row for row in rows}
    lines = []
    for name, options in slow.OPTIONS:
        row, default = by_name[slow.label(name, options)], by_name[name]
        given = ", ".join(f"`{key}: {value}`" for key, value in options.items())
        lines.append([f"`{name}`", given, f"{row.ratio['bf16']:.2f}", f"{row.ms / default.ms:.1f}"])
    return markdown(["format", "option", "times bf16", "times slower than its defaults"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        p.error("vllm is not installed, so there is nothing to compare with")
    check_memory(p, args.context, 4 * slow.KV_HEADS * max(slow.HEAD_SIZES))
    torch.set_num_threads(args.threads)
    if library() is None:
        why = "there are no C++ kernels here to measure; vllm-kvq doctor says what is missing"
        return console.fail("vllm-kvq bench slow", why, args.json)
    if why_not := vllm_build.problem():
        return console.fail("vllm-kvq bench slow", why_not, args.json)
    public: slow.Wanted = [(fmt.name, {}) for fmt in public_formats()]
    by_head = {d: slow.measure(args.context, args.rounds, d, public) for d in slow.HEAD_SIZES}
    defaults: slow.Wanted = [(name, {}) for name in dict.fromkeys(name for name, _ in slow.OPTIONS)]
    variants = slow.measure(args.context, args.rounds, slow.USUAL_HEAD, [*defaults, *slow.OPTIONS])
    where = {"processor": processor_name(), "isa": ISAS[isa()], "threads": args.threads, "context": args.context}
    if args.json:
        measured = [(d, row) for d, rows in (*by_head.items(), (slow.USUAL_HEAD, variants)) for row in rows]
        rows = [{"head_size": d, "kernel": r.name, "ms": r.ms, "times_bf16": r.ratio["bf16"]} for d, r in measured]
        console.show_json({**where, "rows": rows})
        return console.DONE
    print(
        f"{slow.QUERY_HEADS} query and {slow.KV_HEADS} KV heads, {args.context} tokens, {args.threads} thread(s), "
        f"{where['processor']} ({where['isa']}):\n\n{head_table(by_head)}\n\n"
        f"Options, d = {slow.USUAL_HEAD}:\n\n{option_table(variants)}"
    )
    return console.DONE

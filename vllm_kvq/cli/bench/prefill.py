"""`vllm-kvq bench prefill`: the cost of a prompt on top of its attention."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from vllm_kvq import console
from vllm_kvq.bench import figures, prefill, vllm_build
from vllm_kvq.bench.figures import Curves, Scale
from vllm_kvq.bench.prefill import ChunkRow, PromptRow
from vllm_kvq.cli.arguments import add_context, add_formats, add_out, from_zero
from vllm_kvq.cli.bench.arguments import OWN, add_rounds, add_shape, add_threads, check_memory, recommended
from vllm_kvq.cli.bench.report import Report
from vllm_kvq.drawing import Picture
from vllm_kvq.formats import Geometry

PROG = "vllm-kvq bench prefill"
MEDIANS = "Times are medians of rounds, and quotients medians of the rounds' quotients."
PROMPTS = Report(
    PROG,
    "prefill",
    "What a prompt costs on top of its attention: one layer, one request, bf16, next to vLLM's own attention.",
    "Against vLLM's attention",
    (
        MEDIANS,
        "fit: the request's state. pack: all else that updates the caches. Both are shares of the time that vLLM's "
        "attention takes.",
    ),
)
CHUNKS = replace(
    PROMPTS,
    about="A later chunk's attention over packed history: one layer, one request, bf16, next to vLLM's own attention.",
    columns=(MEDIANS, "x vLLM: how many times as fast as vLLM's attention over its bf16 cache ours is."),
)
PROMPT = ("format", "prompt", "fit, ms", "pack, ms", "vLLM's attention, ms", "ours, ms", "fit", "pack")
CHUNK = ("format", "chunk", "after", "vLLM's attention, ms", "ours, ms", "x vLLM")
SHARE = Scale("fit and pack, % of the time of vLLM's attention", ".1f")


def line(row: PromptRow | ChunkRow) -> str:
    if isinstance(row, PromptRow):
        return (
            f"{row.format:9} prompt of {row.tokens}: fit {row.fit_ms:7.1f} ms  pack {row.pack_ms:7.1f} ms  "
            f"attention: vLLM {row.vllm_ms:7.1f} ms, ours {row.ours_ms:7.1f} ms   "
            f"fit {row.fit_share:6.1%} + pack {row.pack_share:6.1%} of vLLM's"
        )
    return (
        f"{row.format:9} chunk of {row.tokens} after {row.context}: vLLM {row.vllm_ms:7.1f} ms, "
        f"ours {row.ours_ms:7.1f} ms   {row.ratio:5.2f} times vLLM's speed"
    )


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "What packing adds to a prompt's attention: fit, pack, and a later chunk's attention over packed history.\n"
        "Takes minutes with several formats or long contexts.",
        ("--formats all --context 4096", "--formats kitty2 --context 4096 --chunk 512 --json"),
        "the command failed",
    )
    add_formats(p, recommended(), OWN)
    add_context(p, "4096", "of the prompt, or before the chunk", several=True)
    text = "tokens per chunk to measure after the context; 0 measures a whole prompt"
    p.add_argument("--chunk", type=from_zero, default=0, metavar="TOKENS", help=text)
    add_shape(p)
    add_threads(p)
    add_rounds(p, 3)
    add_out(p, PROMPTS.files)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if args.query_heads % args.kv_heads:
        p.error(f"{args.query_heads} query heads can't share {args.kv_heads} KV heads evenly")
    try:
        Geometry(args.head_size, prefill.BLOCK)
    except ValueError as error:
        p.error(str(error))
    check_memory(p, max(args.context) + args.chunk, 8 * args.kv_heads * args.head_size)
    torch.set_num_threads(args.threads)
    if why := vllm_build.why_not():
        return console.fail(PROG, why, args.json)
    shape = f"heads {args.query_heads}/{args.kv_heads}  d {args.head_size}  threads {args.threads}"
    if not args.json:
        print(shape)
    rows: list[PromptRow | ChunkRow] = []
    for context in args.context:
        new = args.chunk or context
        q = torch.randn(new, args.query_heads, args.head_size).bfloat16()
        k, v = torch.randn(2, new, args.kv_heads, args.head_size).bfloat16()
        plain = prefill.Plain(q, k, v, context if args.chunk else 0)
        for choice in args.formats:
            name, options = choice.format, choice.options
            if args.chunk:
                rows.append(prefill.chunk_row(name, q, k, v, context, plain, args.rounds, options))
            else:
                rows.append(prefill.prompt_row(name, q, k, v, plain, args.rounds, options))
            if not args.json:
                print(line(rows[-1]), flush=True)
    if args.out:
        facts = [("threads", str(args.threads))]
        records = [asdict(row) for row in rows]
        (CHUNKS if args.chunk else PROMPTS).write(
            args.out, records, lambda path: plot(path, rows, shape), [table(rows, shape)], [], arguments, facts
        )
    if args.json:
        sizes = {"query_heads": args.query_heads, "kv_heads": args.kv_heads, "head_size": args.head_size}
        console.show_json({**sizes, "threads": args.threads, "rows": [asdict(row) for row in rows]})
    return console.DONE


def table(rows: Sequence[PromptRow | ChunkRow], shape: str) -> console.Table:
    chunks = isinstance(rows[0], ChunkRow)
    return console.Table(CHUNK if chunks else PROMPT, [*map(cells, rows)], title=f"{_what(rows)}: {shape}")


def cells(row: PromptRow | ChunkRow) -> list[str]:
    if isinstance(row, ChunkRow):
        times = (f"{ms:.1f}" for ms in (row.vllm_ms, row.ours_ms))
        return [row.format, str(row.tokens), str(row.context), *times, f"{row.ratio:.2f}"]
    times = (f"{ms:.1f}" for ms in (row.fit_ms, row.pack_ms, row.vllm_ms, row.ours_ms))
    return [row.format, str(row.tokens), *times, f"{row.fit_share:.1%}", f"{row.pack_share:.1%}"]


def plot(path: Path, rows: Sequence[PromptRow | ChunkRow], shape: str) -> Picture:
    curves: Curves = {}
    for row in rows:
        at = (
            (row.context, row.ratio)
            if isinstance(row, ChunkRow)
            else (row.tokens, 100 * (row.fit_share + row.pack_share))
        )
        curves.setdefault(row.format, []).append(at)
    scale = figures.times("vLLM") if isinstance(rows[0], ChunkRow) else SHARE
    return figures.draw(path, {"": curves}, f"{_what(rows)}\n{shape}", scale)


def _what(rows: Sequence[PromptRow | ChunkRow]) -> str:
    first = rows[0]
    return (
        f"Attention of a chunk of {first.tokens:,} tokens"
        if isinstance(first, ChunkRow)
        else "Fitting and packing a prompt"
    )

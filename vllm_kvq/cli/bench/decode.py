"""`vllm-kvq bench decode MODEL`: tokens per second of a whole engine with each format, and with bf16."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict

from vllm_kvq import console
from vllm_kvq.bench import decode, figures
from vllm_kvq.bench.decode import Row
from vllm_kvq.cli.arguments import add_context, add_formats, add_out, add_tokens
from vllm_kvq.cli.bench.arguments import CHECKPOINT, OWN, add_batch, add_eager, add_rounds, checkpoint, recommended
from vllm_kvq.cli.bench.report import Report

PROG = "vllm-kvq bench decode"
REPORT = Report(
    PROG,
    "decode",
    "Decoding speed of whole engines, one with each format and one with the bf16 cache, which take turns on the same "
    "prompts.",
    "Speed against bf16",
    ("Tokens per second, of all requests together, are medians of rounds. x bf16: the median of the rounds' ratios.",),
)
HEAD = ("format", "tokens/s", "bf16 tokens/s", "x bf16")


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Decoding speed of the whole engine: tokens per second of each format against the plain bf16 cache.\n"
        "Takes minutes: engines start, and each round decodes.",
        ("demo", "MODEL --formats klt3,kitty2 --min-ratio 1 --json"),
        "a format decodes slower than --min-ratio",
    )
    p.add_argument("model", metavar="MODEL", help=CHECKPOINT)
    add_formats(p, recommended(), OWN)
    add_batch(p, "16")
    add_context(p, "512", "of each request's prompt")
    add_tokens(p, "64", "per request")
    add_rounds(p, 5)
    text = "ratio to bf16 below which the command exits with 1"
    p.add_argument("--min-ratio", type=float, default=0.0, metavar="RATIO", help=text)
    add_eager(p)
    add_out(p, REPORT.files)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    load = decode.Load(args.batch, args.context, args.tokens, args.rounds, args.eager)
    model = checkpoint(p, args.model, load.max_len)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    rows = []
    for row in decode.rows(str(model), [(c.format, c.options) for c in args.formats], load):
        rows.append(row)
        if not args.json:
            print(
                f"{row.format}: {row.tokens_per_second:.0f} tokens/s, bf16 {row.bf16_tokens_per_second:.0f} tokens/s, "
                f"ratio {row.ratio:.2f} (batch {args.batch}, context {args.context}, median of {args.rounds} rounds)",
                flush=True,
            )
    slow = [row.format for row in rows if row.ratio < args.min_ratio]
    verdict = [f"slower than {args.min_ratio} of bf16: {', '.join(slow)}"] if slow else []
    if args.out:
        said = about(args)
        curves: figures.Curves = {row.format: [(args.context, row.ratio)] for row in rows}
        REPORT.write(
            args.out,
            [asdict(row) for row in rows],
            lambda path: figures.draw(path, {"": curves}, f"Decoding\n{said}", figures.times("bf16")),
            [table(rows, f"Decoding: {said}")],
            verdict,
            arguments,
            [("model", args.model)],
            args.model,
        )
    if args.json:
        load_document = {"batch": args.batch, "context": args.context, "rounds": args.rounds}
        console.show_json({**load_document, "rows": [asdict(row) for row in rows]})
    elif slow:
        print(*verdict)
    return console.FOUND if slow else console.DONE


def about(args: argparse.Namespace) -> str:
    return (
        f"batch {args.batch}, context {args.context}, {args.tokens} tokens per request, median of {args.rounds} rounds"
    )


def table(rows: Sequence[Row], title: str) -> console.Table:
    cells = [
        [r.format, f"{r.tokens_per_second:.0f}", f"{r.bf16_tokens_per_second:.0f}", f"{r.ratio:.2f}"] for r in rows
    ]
    return console.Table(HEAD, cells, title=title)

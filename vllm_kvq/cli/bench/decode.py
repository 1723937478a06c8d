"""`vllm-kvq bench decode MODEL`: tokens per second of a whole engine with each format, and with bf16."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict

from vllm_kvq import console
from vllm_kvq.bench import decode
from vllm_kvq.cli.arguments import add_context, add_formats, add_tokens
from vllm_kvq.cli.bench.arguments import CHECKPOINT, OWN, add_batch, add_eager, add_rounds, checkpoint, recommended


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench decode",
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
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    load = decode.Load(args.batch, args.context, args.tokens, args.rounds, args.eager)
    model = checkpoint(p, args.model, load.max_len)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
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
    if args.json:
        load_document = {"batch": args.batch, "context": args.context, "rounds": args.rounds}
        console.show_json({**load_document, "rows": [asdict(row) for row in rows]})
    elif slow:
        print(f"slower than {args.min_ratio} of bf16: {', '.join(slow)}")
    return console.FOUND if slow else console.DONE

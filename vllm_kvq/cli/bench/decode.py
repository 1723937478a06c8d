"""`vllm-kvq bench decode MODEL`: tokens per second of a whole engine with each format, and with bf16."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.bench import decode
from vllm_kvq.cli.bench.arguments import add_formats


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench decode",
        "Decoding speed of the whole engine: tokens per second of each format against the plain bf16 cache.",
        ("--model models/demo", "--model .demo/model --formats kitty2,qjl3 --min-ratio 1 --json"),
        "a format decodes slower than --min-ratio",
    )
    p.add_argument("--model", required=True, help="checkpoint folder, for example models/demo")
    add_formats(p)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--context", type=int, default=512, help="prompt tokens per request")
    p.add_argument("--tokens", type=int, default=64, help="decoded tokens per request")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--min-ratio", type=float, default=0.0, help="ratio to bf16 below which the command exits with 1")
    p.add_argument("--eager", action="store_true", help="disable torch.compile")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if not (Path(args.model) / "config.json").is_file():
        p.error(f"--model {args.model!r} is no folder with a config.json; models/demo is one")
    try:
        load = decode.Load(args.batch, args.context, args.tokens, args.rounds, args.eager)
    except ValueError as error:
        p.error(str(error))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    rows = []
    for row in decode.rows(args.model, args.formats, load):
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

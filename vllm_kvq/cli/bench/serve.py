"""`vllm-kvq bench serve`: two servers, one with a format's cache and one with bf16's, over HTTP."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.bench import serve
from vllm_kvq.bench.serve import Load, Row
from vllm_kvq.bench.server import ServerError
from vllm_kvq.cli.bench.arguments import add_formats

HEADER = (
    "  context batch   ms/token          ratio   tokens/s            first token, cold (ms)    attention\n"
    "                      bf16   packed            bf16   packed       bf16   packed  ratio     share kernel expected"
    " at most"
)


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench serve",
        "`vllm serve` with each format against `vllm serve` with a bf16 cache: time per token, and to the first token.",
        ("", "--formats kitty2 --context 512 4096 16384 --layers 1 --eager", "--model ./checkpoint --batch 1 4 --json"),
        "a server failed; the end of its log says why",
    )
    add_formats(p)
    p.add_argument("--context", nargs="+", type=int, default=[512, 4096, 16384], help="prompt tokens per request")
    p.add_argument("--batch", nargs="+", type=int, default=[1])
    p.add_argument("--tokens", type=int, default=32, help="decoded tokens per request")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--cold", type=int, default=2, help="number of cold prompts, for the time to the first token")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--model", type=Path, help="checkpoint folder instead of the random model")
    p.add_argument("--eager", action="store_true", help="disable torch.compile")
    p.add_argument(
        "--folder", type=Path, default=Path(".demo"), help="folder for the random model and the servers' logs"
    )
    console.add_json(p)
    return p


def line(row: Row) -> str:
    cell, share, kernel = row.cell, row.share, row.kernel
    text = (
        f"  {cell.context:7} {cell.batch:5}   {cell.plain.step * 1e3:8.2f} {cell.packed.step * 1e3:8.2f} "
        f"{cell.ratio:6.2f}   {cell.batch / cell.plain.step:8.1f} {cell.batch / cell.packed.step:8.1f}   "
        f"{cell.plain.first * 1e3:8.0f} {cell.packed.first * 1e3:8.0f} {cell.first_ratio:6.2f}"
    )
    if share is None:
        return f"{text}           {kernel:6.2f}"
    return f"{text}   {share:7.0%} {kernel:6.2f} {serve.gain(share, kernel):8.2f} {1 / (1 - share):7.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if args.layers < 1:
        p.error("layers must be at least 1")
    if args.folder.exists() and not args.folder.is_dir():
        p.error(f"--folder {args.folder} is a file; name a folder")
    try:
        load = Load(args.context, args.batch, args.tokens, args.rounds, args.cold, args.eager)
    except ValueError as error:
        p.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # for the servers to be stopped
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: list[Row] = []
    try:
        model = args.model or serve.bench_model(args.folder, args.layers, load.max_len)
        for row in serve.rows(args.formats, model, load, args.folder):
            if not args.json:
                print(*lines(row, first=not rows or rows[-1].format != row.format), sep="\n", flush=True)
            rows.append(row)
    except ServerError as error:
        print(*error.log_tail, f"bench serve: {error}", sep="\n", file=sys.stderr)
        return console.FOUND
    if args.json:
        console.show_json({"model": str(model), "rows": [row.document() for row in rows]})
    return console.DONE


def lines(row: Row, first: bool) -> list[str]:
    """What is printed of a row; `first` of its format, it has the table's head above it."""
    return [f"{row.format} against bf16", HEADER, line(row)] if first else [line(row)]

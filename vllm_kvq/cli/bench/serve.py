"""`vllm-kvq bench serve`: two servers, one with a format's cache and one with bf16's, over HTTP."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from vllm_kvq import console
from vllm_kvq.bench import serve
from vllm_kvq.bench.serve import Load, Row
from vllm_kvq.bench.server import ServerError
from vllm_kvq.cli.arguments import add_context, add_formats, add_out, add_tokens, whole_number
from vllm_kvq.cli.bench.arguments import CHECKPOINT, OWN, add_batch, add_eager, add_rounds, checkpoint, recommended

HEADER = (
    "  context batch   ms/token          ratio   tokens/s            first token, cold (ms)    attention\n"
    "                      bf16   packed            bf16   packed       bf16   packed  ratio     share kernel expected"
    " at most"
)


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench serve",
        "`vllm serve` with each format against `vllm serve` with a bf16 cache: times per token, and to the first.\n"
        "Takes minutes: each server starts, and each context is measured.",
        ("", "MODEL --formats kitty2 --batch 1,4 --json", "--context 512,16384 --layers 1 --eager"),
        "a server failed; the end of its log says why",
    )
    p.add_argument("model", nargs="?", metavar="MODEL", help=f"{CHECKPOINT} (default: a random model)")
    add_formats(p, recommended(), OWN)
    add_context(p, "512,4096,16384", "of each request's prompt", several=True)
    add_batch(p, "1", several=True)
    add_tokens(p, "32", "per request")
    add_rounds(p, 5)
    text = "number of cold prompts, for the time to the first token"
    p.add_argument("--cold", type=whole_number, default=2, metavar="N", help=text)
    p.add_argument("--layers", type=whole_number, default=2, metavar="N", help="layers of the random model")
    add_eager(p)
    add_out(p, "the random model, and bench-FORMAT.log of each server", ".demo")
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
    try:
        load = Load(args.context, args.batch, args.tokens, args.rounds, args.cold, args.eager)
    except ValueError as error:
        p.error(str(error))
    named = None if args.model is None else checkpoint(p, args.model, load.max_len)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # for the servers to be stopped
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: list[Row] = []
    try:
        model = named or serve.bench_model(args.out, args.layers, load.max_len)
        for row in serve.rows([(c.format, c.options) for c in args.formats], model, load, args.out):
            if not args.json:
                print(*lines(row, first=not rows or rows[-1].format != row.format), sep="\n", flush=True)
            rows.append(row)
    except ServerError as error:
        print(*error.log_tail, sep="\n", end="\n" if error.log_tail else "", file=sys.stderr)
        return console.fail("vllm-kvq bench serve", error, args.json)
    if args.json:
        console.show_json({"model": str(model), "rows": [row.document() for row in rows]})
    return console.DONE


def lines(row: Row, first: bool) -> list[str]:
    """What is printed of a row; `first` of its format, it has the table's head above it."""
    return [f"{row.format} against bf16", HEADER, line(row)] if first else [line(row)]

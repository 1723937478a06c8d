"""`vllm-kvq bench serve`: two servers, one with a format's cache and one with bf16's, over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kvq import console
from vllm_kvq.bench import figures
from vllm_kvq.bench.figures import Curves
from vllm_kvq.bench.servers import serve
from vllm_kvq.bench.servers.serve import Load, Row
from vllm_kvq.bench.servers.server import ServerError
from vllm_kvq.cli.arguments import add_context, add_formats, add_out, add_tokens, whole_number
from vllm_kvq.cli.bench import servers
from vllm_kvq.cli.bench.arguments import CHECKPOINT, OWN, add_batch, add_eager, add_rounds, checkpoint, recommended
from vllm_kvq.cli.bench.report import Report
from vllm_kvq.drawing import Picture

PROG = "vllm-kvq bench serve"
FOLDER = Path(".demo")
"""Where the random model and logs go without --out."""
REPORT = Report(
    PROG,
    "serve",
    "vllm serve with each format and with the bf16 cache, over HTTP: both servers are up at once and take turns on "
    "the same prompts.",
    "Speed against bf16",
    (
        "ms per token: from the first token to the last, with prompts that the prefix cache holds. First token: of "
        "prompts that are new to the server. Both are medians, and ratios, how many times as fast as bf16, are medians "
        "of the turns' ratios.",
        "share: the part of bf16's step that the context causes, against the shortest one. kernel: the speed of only "
        "the attention kernel. expected: the ratio that follows from both; and at most: what no cache could exceed.",
    ),
)
HEAD = (
    "context", "batch", "bf16,\nms per token", "packed,\nms per token", "ratio", "bf16,\ntokens/s", "packed,\ntokens/s",
    "bf16, first\ntoken, ms", "packed, first\ntoken, ms", "ratio of\nfirst token", "share", "kernel", "expected",
    "at most",
)  # fmt: skip
MEASURED, ATTENTION = (*range(10),), (0, 1, 4, 10, 11, 12, 13)
"""The columns of a table of what was measured, and of one on attention's part in it."""
HEADER = (
    "  context batch   ms/token          ratio   tokens/s            first token, cold (ms)    attention\n"
    "                      bf16   packed            bf16   packed       bf16   packed  ratio     share kernel expected"
    " at most"
)


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
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
    logs = "the random model and bench-FORMAT.log of each server"
    add_out(p, f"{REPORT.files}, and for {logs} (default: {FOLDER} for these two, and no report)")
    console.add_json(p)
    return p


def cells(row: Row) -> list[str]:
    """The row's cells without the format."""
    cell, share, kernel = row.cell, row.share, row.kernel
    text = [str(cell.context), str(cell.batch)]
    text += [f"{cell.plain.step * 1e3:.2f}", f"{cell.packed.step * 1e3:.2f}", f"{cell.ratio:.2f}"]
    text += [f"{cell.batch / cell.plain.step:.1f}", f"{cell.batch / cell.packed.step:.1f}"]
    text += [f"{cell.plain.first * 1e3:.0f}", f"{cell.packed.first * 1e3:.0f}", f"{cell.first_ratio:.2f}"]
    if share is None:
        return [*text, "", f"{kernel:.2f}", "", ""]
    return [*text, f"{share:.0%}", f"{kernel:.2f}", f"{serve.gain(share, kernel):.2f}", f"{1 / (1 - share):.2f}"]


LINE = "  {:>7} {:>5}   {:>8} {:>8} {:>6}   {:>8} {:>8}   {:>8} {:>8} {:>6}   {:>7} {:>6} {:>8} {:>7}"


def line(row: Row) -> str:
    return LINE.format(*cells(row)).rstrip()


def table(rows: Sequence[Row], columns: Sequence[int], title: str) -> console.Table:
    shown = [[row.format, *(text[i] for i in columns)] for row, text in ((row, cells(row)) for row in rows)]
    return console.Table(["format", *(HEAD[i] for i in columns)], shown, title=title)


def record(row: Row) -> dict[str, Any]:
    """The row's document as one line of a CSV; times are in seconds."""
    flat: dict[str, Any] = {}
    for name, value in row.document().items():
        flat |= {f"{name}_{part}": x for part, x in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def plot(path: Path, rows: Sequence[Row], title: str) -> Picture:
    panels: dict[str, Curves] = {}
    for row in rows:
        curves = panels.setdefault(f"batch {row.cell.batch}", {})
        curves.setdefault(row.format, []).append((row.cell.context, row.cell.ratio))
    return figures.draw(path, panels, title, figures.times("bf16", "tokens per second,"))


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    try:
        load = Load(args.context, args.batch, args.tokens, args.rounds, args.cold, args.eager)
    except ValueError as error:
        p.error(str(error))
    named = None if args.model is None else checkpoint(p, args.model, load.max_len)
    servers.prepare()
    rows: list[Row] = []
    folder = args.out or FOLDER
    try:
        model = named or serve.bench_model(folder, args.layers, load.max_len)
        for row in serve.rows([(c.format, c.options) for c in args.formats], model, load, folder):
            if not args.json:
                print(*lines(row, first=not rows or rows[-1].format != row.format), sep="\n", flush=True)
            rows.append(row)
    except ServerError as error:
        return servers.failed(PROG, error, args.json)
    if args.out:
        said = f"{args.tokens} tokens per request, medians of {args.rounds} rounds and {args.cold} cold prompts"
        name = args.model or f"random weights, {args.layers} layers"
        REPORT.write(
            args.out,
            [*map(record, rows)],
            lambda path: plot(path, rows, f"Decoding\n{said}"),
            [table(rows, MEASURED, f"Servers: {said}"), table(rows, ATTENTION, "Attention's part of a step")],
            [],
            arguments,
            [("model", name)],
            name,
        )
    if args.json:
        console.show_json({"model": str(model), "rows": [row.document() for row in rows]})
    return console.DONE


def lines(row: Row, first: bool) -> list[str]:
    """What is printed of a row; the `first` one of a format has the table's head above it."""
    return [f"{row.format} against bf16", HEADER, line(row)] if first else [line(row)]

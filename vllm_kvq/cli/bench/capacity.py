"""`vllm-kvq bench capacity MODEL`: what servers with equal bytes of cache do under the same load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.bench import figures
from vllm_kvq.bench.servers import capacity
from vllm_kvq.bench.servers.capacity import Found, Load
from vllm_kvq.bench.servers.server import ServerError
from vllm_kvq.cli.arguments import add_context, add_formats, add_out, add_tokens, from_zero, size, whole_number
from vllm_kvq.cli.bench import servers
from vllm_kvq.cli.bench.arguments import CHECKPOINT, add_batch, add_eager, checkpoint
from vllm_kvq.cli.bench.report import Report
from vllm_kvq.drawing import Picture, pyplot, save
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED

PROG = "vllm-kvq bench capacity"
FOLDER = Path(".demo/capacity")
"""Where logs go without --out."""
REPORT = Report(
    PROG,
    "capacity",
    "Servers with equal bytes of cache, one after the other, under the same load of vllm bench serve.",
    "Tokens per second against requests in flight",
    (
        "fit: the tokens that vLLM says fit in the cache. in flight: requests that ran at the same time, the median of "
        "the whole load. Tokens are those of answers. First token and token: the median and the 99th percentile of all "
        "requests. pre-empted: how often a request lost its cache and was computed again. hits: the share of "
        "prompts' tokens that the prefix cache had.",
    ),
)
HEAD = (
    *("\ncache", "\nfit", "in\nflight", "tokens/s", "\nx bf16", "first token (s)\np50", "\np99"),
    *("token (ms)\np50", "\np99", "pre-\nempted", "\nhits"),
)


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Servers with equal bytes of cache, one after the other, under the same load of\n"
        "`vllm bench serve`: concurrent requests, tokens per second, and waiting.\n"
        "Takes minutes for each cache.",
        (
            "MODEL --cache-bytes 64M",
            "MODEL --formats fp8,kitty2 --context 4096 --tokens 200",
        ),
        "a server failed; the end of its log says why",
    )
    p.add_argument("model", metavar="MODEL", help=CHECKPOINT)
    add_formats(p, ",".join(("fp8", *BUDGETS[RECOMMENDED].formats)))
    p.add_argument("--cache-bytes", metavar="SIZE", type=size, default="64M", help="memory of each server's cache")
    add_context(p, "512", "of each request's prompt")
    add_tokens(p, "512", "per request")
    p.add_argument("--requests", metavar="N", type=whole_number, default=32, help="requests in all")
    add_batch(p, "32", " that clients keep open")
    p.add_argument("--seed", metavar="SEED", type=from_zero, default=0, help="seed of the prompts")
    add_eager(p)
    logs = "each server's log and what `vllm bench serve` said of it"
    add_out(p, f"{REPORT.files}, and for {logs} (default: {FOLDER} for these two, and no report)")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    numbers = (args.context, args.tokens, args.requests, args.batch, args.cache_bytes, args.seed, args.eager)
    if all(choice.format == capacity.PLAIN for choice in args.formats):
        p.error(f"--formats {capacity.PLAIN} is bf16, which is always measured; name a cache to compare it with")
    try:
        load = Load(*numbers)
    except ValueError as error:
        p.error(str(error))
    model = checkpoint(p, args.model, load.max_len)
    servers.prepare()
    folder = args.out or FOLDER
    rows: list[Found] = []
    try:
        for found in capacity.rows([(c.format, c.options) for c in args.formats], model, load, folder):
            rows.append(found)
            if not args.json:
                print(f"{found.cache}: {found.tokens_per_second:.1f} tokens/s", file=sys.stderr, flush=True)
    except ServerError as error:
        return servers.failed(PROG, error, args.json)
    if args.out:
        documents, facts = [row.document() for row in rows], [("model", args.model)]
        REPORT.write(
            args.out,
            documents,
            lambda path: plot(path, rows, load),
            [table(rows, load)],
            [],
            arguments,
            facts,
            args.model,
        )
    if args.json:
        console.show_json({"model": str(model), "rows": [row.document() for row in rows]})
    else:
        table(rows, load).show()
    return console.DONE


def table(rows: Sequence[Found], load: Load) -> console.Table:
    """The first row is bf16's."""
    return console.Table([pad(head) for head in HEAD], [cells(row, rows[0]) for row in rows], title=heading(load))


def heading(load: Load) -> str:
    return (
        f"{load.requests} requests of {load.prompt} + {load.answer} tokens, {load.concurrency} at the same time; "
        f"{load.cache_bytes / (1 << 20):,.0f} MiB of cache"
    )


def pad(head: str) -> str:
    """The head as two lines."""
    return head if "\n" in head else f"\n{head}"


def cells(row: Found, plain: Found) -> list[str]:
    return [
        row.cache,
        f"{row.tokens:,}",
        f"{row.in_flight:.0f}",
        f"{row.tokens_per_second:.1f}",
        f"{row.tokens_per_second / plain.tokens_per_second:.2f}",
        *(f"{x:.2f}" for x in row.first),
        *(f"{1e3 * x:.1f}" for x in row.step),
        str(row.preemptions),
        f"{row.hits:.0%}",
    ]


def plot(path: Path, rows: Sequence[Found], load: Load) -> Picture:
    """Each cache's tokens per second against the requests that it had in flight."""
    title, found = heading(load), {row.cache: (row.in_flight, row.tokens_per_second) for row in rows}
    figure, axes = pyplot().subplots(figsize=(8, 4.6), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10)
    figures.points(axes, found, figures.IN_FLIGHT, figures.OUTPUT)
    return save(figure, path, title)

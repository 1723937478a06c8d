"""The command `vllm-kvq`, also `python -m vllm_kvq`. Each subcommand lives in the module that does its work."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_kvq.formats.codec import SUPPORTED_HEADS_TEXT
from vllm_kvq.formats.table import FORMATS, declared_options, key_codecs, value_codecs

MODULES = {
    "bench attention": "vllm_kvq.bench.attention",
    "bench decode": "vllm_kvq.bench.decode",
    "bench serve": "vllm_kvq.bench.serve",
    "bench prefill": "vllm_kvq.bench.prefill",
    "eval error": "vllm_kvq.eval.error_table",
}
"""Subcommand -> module with a `main()` that reads `sys.argv`; imported only when asked for."""


def formats_table(head_sizes: Sequence[int], block_sizes: Sequence[int]) -> str:
    """Exact bits per element and capacity factor of every format, counted from its byte layout."""
    columns = [(d, n) for d in head_sizes for n in block_sizes]
    rows = [["format", "method", *(f"d={d} N={n}" for d, n in columns)], ["", "", *["bits   factor"] * len(columns)]]
    for fmt in FORMATS.values():
        cells = [f"{fmt.bits_per_element(d, n):.4f}  {fmt.capacity_factor(d, n):5.2f}x" for d, n in columns]
        rows.append([fmt.name, fmt.title, *cells])
    name, title = (max(len(row[i]) for row in rows) + 2 for i in (0, 1))
    lines = [f"{row[0]:{name}}{row[1]:{title}}" + "".join(f"{cell:>18}" for cell in row[2:]) for row in rows]
    return "\n".join(
        [
            *lines,
            "",
            "bits: per cached element, keys and values averaged, with parameters, headers and alignment",
            "factor: tokens in the packed pages against a 16-bit cache of the same size; each running request also",
            "holds a full-precision window (see the line that starts with 'kvq:' when the server starts)",
            f"head sizes: {SUPPORTED_HEADS_TEXT}",
        ]
    )


def options_table() -> str:
    """The codecs and every option that users may set, as they are declared."""
    codecs, options = [["codec", "what it stores"]], [["option", "meaning", "read by", "values"]]
    codecs += [[f"keys {codec.name}", codec.title] for codec in key_codecs().values()]
    codecs += [[f"values {codec.name}", codec.title] for codec in value_codecs().values()]
    options += [[o.name, o.help, ", ".join(readers) or "all", o.allowed] for o, readers in declared_options()]
    return "\n".join([*_aligned(codecs), "", *_aligned(options)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return ["".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def run_module(command: str, module: str, arguments: Sequence[str]) -> int:
    """`main()` of a module, which reads `sys.argv`, as a command of that name."""
    sys.argv = [command, *arguments]
    return int(importlib.import_module(module).main() or 0)


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    for name, module in MODULES.items():
        words = name.split()
        if args[: len(words)] == words:
            return run_module(f"vllm-kvq {name}", module, args[len(words) :])
    parser = argparse.ArgumentParser(
        prog="vllm-kvq",
        description="Low-bit KV cache formats for vLLM.",
        epilog="further commands: " + ", ".join(MODULES) + " (each with --help)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    table = commands.add_parser("formats", help="exact bits per element and capacity factor of every format")
    table.add_argument("--head-size", type=int, nargs="+", default=[64, 128], metavar="D")
    table.add_argument("--block-size", type=int, nargs="+", default=[64, 128], metavar="N")
    table.add_argument("--options", action="store_true", help="print the codecs and their options instead")
    options = parser.parse_args(args)
    try:
        print(options_table() if options.options else formats_table(options.head_size, options.block_size))
    except ValueError as error:
        parser.exit(2, f"vllm-kvq: {error}\n")
    return 0

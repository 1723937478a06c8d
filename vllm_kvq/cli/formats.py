"""`vllm-kvq formats`: what the table of formats declares."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from vllm_kvq import console
from vllm_kvq.cli.arguments import CHANNELS, head_sizes, whole_numbers
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.settings import Settings
from vllm_kvq.formats.table import Format, declared_options, key_codecs, public_formats, value_codecs

UNSET = "unset"
HEADS, PAGES = "64,128", "64,128"
NOTES = f"""
bits: per cached element, keys and values averaged, everything counted
factor: tokens in the packed pages against a 16-bit cache of the same size; each
running request also holds a full-precision window (a server's `kvq:` line)
head sizes: {", ".join(map(str, HEAD_SIZES))}; 80 and 112 are zero-padded"""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq formats",
        "Exact bits per element and capacity factor of every format, counted from its byte layout.",
        ("", "--head-size 96,128 --block-size 128", "--options", "--json"),
        "the command failed",
    )
    text = f"{CHANNELS} (default: {HEADS})"
    p.add_argument("--head-size", type=head_sizes, metavar="D,...", help=text)
    p.add_argument("--block-size", type=whole_numbers, metavar="N,...", help=f"tokens per page (default: {PAGES})")
    p.add_argument("--options", action="store_true", help="print the codecs and their options instead")
    console.add_json(p)
    return p


def formats_table(head_sizes: Sequence[int], block_sizes: Sequence[int]) -> console.Table:
    """Exact bits per element and capacity factor of every format, counted from its byte layout."""
    columns = [(d, n) for d in head_sizes for n in block_sizes]
    rows = [[fmt.name, *(_cell(fmt, d, n) for d, n in columns)] for fmt in public_formats()]
    return console.Table(["format\n", *(f"d={d} N={n}\nbits factor" for d, n in columns)], rows)


def methods_table() -> console.Table:
    return console.Table(["format", "method"], [[fmt.name, fmt.title] for fmt in public_formats()], 2)


def budgets_table() -> console.Table:
    rows = [(budget.name, ", or ".join(budget.formats)) for budget in BUDGETS.values()]
    return console.Table(("budget", "the first of these that a server can have"), rows, 2)


def _cell(fmt: Format, head_size: int, block_size: int) -> str:
    try:
        bits, factor = fmt.bits_per_element(head_size, block_size), fmt.capacity_factor(head_size, block_size)
    except ValueError:
        return "-"
    return f"{bits:.4f} {factor:.2f}x"


def problems(head_sizes: Sequence[int], block_sizes: Sequence[int]) -> dict[str, str]:
    """Why formats don't have these sizes, by name. ValueError if no format has them."""
    found = {}
    for fmt in public_formats():
        for d, n in product(head_sizes, block_sizes):
            try:
                fmt.bits_per_element(d, n)
            except ValueError as error:
                found[fmt.name] = str(error)
    if len(found) == len(public_formats()):
        raise ValueError(next(iter(found.values())))
    return found


def formats_document(head_sizes: Sequence[int], block_sizes: Sequence[int]) -> list[dict[str, Any]]:
    lacking = problems(head_sizes, block_sizes)
    return [
        {
            "format": fmt.name,
            "method": fmt.title,
            "head_size": d,
            "block_size": n,
            "bits": fmt.bits_per_element(d, n),
            "factor": fmt.capacity_factor(d, n),
            "W": (page := fmt.bind(Geometry(d, n))).W,
            "S": page.S,
        }
        for fmt in public_formats()
        if fmt.name not in lacking
        for d in head_sizes
        for n in block_sizes
    ]


def codecs() -> list[tuple[str, str, str]]:
    halves = (("keys", key_codecs()), ("values", value_codecs()))
    return [(half, codec.name, codec.title) for half, known in halves for codec in known.values()]


def options_tables() -> tuple[console.Table, console.Table]:
    """The codecs and every option that users may set, as declared."""
    options = [
        (o.name, o.help, default_text(o, readers), ", ".join(readers) or "all", o.allowed)
        for o, readers in declared_options()
    ]
    return (
        console.Table(("codec", "what it stores"), [(f"{half} {name}", title) for half, name, title in codecs()], 2),
        console.Table(("option", "meaning", "default", "read by", "values"), options, 5),
    )


def default_text(option: Option, readers: Sequence[str]) -> str:
    """The defaults of the formats that read the option, the most frequent one first."""
    found = Counter(
        _written(_setting(settings, option.name))
        for settings in (fmt.settings() for fmt in public_formats())
        if not readers or {settings.keys.name, settings.values.name} & {*readers}
    )
    values = [text for text, _ in found.most_common()] or [_written(option.default)]
    return " or ".join(values) if len(values) < 4 else "by format"


def _setting(settings: Settings, name: str) -> Any:
    own = dict(settings.own)
    return own[name] if name in own else getattr(settings, name)


def _written(value: Any) -> str:
    return UNSET if value is None else "none" if value == () else str(getattr(value, "name", value))


def options_document() -> dict[str, Any]:
    return {
        "codecs": [{"half": half, "name": name, "stores": title} for half, name, title in codecs()],
        "options": [
            {"name": o.name, "meaning": o.help, "read_by": list(readers), "values": o.allowed, "default": o.default}
            for o, readers in declared_options()
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if args.options and (args.head_size or args.block_size):
        p.error("--options lists what may be set, whatever the sizes; leave out --head-size and --block-size")
    if args.options:
        if args.json:
            console.show_json(options_document())
            return console.DONE
        first, second = options_tables()
        first.show()
        print()
        second.show()
        print(f"\n{UNSET}: the head size, the model or vLLM decides; by format: see vllm-kvq formats")
        return console.DONE
    heads, pages = args.head_size or head_sizes(HEADS), args.block_size or whole_numbers(PAGES)
    try:
        if args.json:
            console.show_json(formats_document(heads, pages))
            return console.DONE
        lacking = problems(heads, pages)
        table = formats_table(heads, pages)
    except ValueError as error:
        p.error(str(error))
    table.show()
    print()
    methods_table().show()
    print()
    budgets_table().show()
    print(NOTES)
    for name, problem in lacking.items():
        print(f"{name}: {problem}")
    return console.DONE

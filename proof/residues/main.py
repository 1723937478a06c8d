"""The command `python -m proof residues`.

    python -m proof residues                              every length, `lossless` and a format of each method
    python -m proof residues --formats lossless --stride 7
    python -m proof residues --report FILE                the table goes to FILE, a page of docs/results

Exits with 1 on a mismatch, after printing a case for `python -m proof fuzz --replay FILE`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from proof.fuzz.listed import Judged, judge_listed
from proof.fuzz.main import default
from proof.residues import sweep
from vllm_kvq.cli.arguments import words
from vllm_kvq.formats import FORMATS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof residues",
        description="Every prompt length modulo the page on real engines, every token judged.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--formats", type=words(sorted(FORMATS)), default=default(), metavar="FORMAT,...")
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="N", help="tokens of a page (default: %(default)s)"
    )
    parser.add_argument("--stride", type=int, default=1, help="from one length to the next (default: %(default)s)")
    parser.add_argument(
        "--runner", choices=("V1", "V2"), default="V1", help="vLLM's model runner (default: %(default)s)"
    )
    text = "concurrent engines (default: the number of cores)"
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help=text)
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for processor, command and table")
    options = parser.parse_args(argv)
    if options.jobs < 1 or options.stride < 1:
        parser.error("--jobs and --stride must be positive")
    try:
        cases = [
            sweep.case(setup, options.stride)
            for name in options.formats
            for setup in sweep.setups(name, options.block_size, options.runner)
        ]
    except ValueError as error:
        parser.error(f"--block-size {options.block_size}: {error}")
    found = judge_listed([(case.setup.format, case) for case in cases], options.jobs)
    if options.report:
        options.report.write_text(page(options, found), encoding="utf-8")
    return found.say()


def page(options: argparse.Namespace, found: Judged) -> str:
    command = f"python -m proof residues --formats {','.join(options.formats)}"
    command += "".join(
        f" --{name.replace('_', '-')} {getattr(options, name)}"
        for name, usual in (("block_size", 64), ("stride", 1), ("runner", "V1"))
        if getattr(options, name) != usual
    )
    some = f" (of which every {options.stride} were tried)" if options.stride > 1 else ""
    return f"""# Every prompt length

Every prompt length from 1 to two pages of {options.block_size}, the window and {sweep.MORE} tokens{some}:
cold, and with a prefix hit behind each page; prompts whole, and cut into chunks at any place; with 0, 1 and 5 drafted
tokens; answers pass the next page's border. Every token is judged: `lossless` must give plain vLLM's tokens, the others
the reference's (docs/testing.md).

{found.how}

    {command}

{chr(10).join("    " + line for line in found.table.splitlines())}

A *tie* is a token that the reference chooses as well once it is disturbed by what float32 rounds.
"""

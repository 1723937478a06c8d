"""The command `python -m proof contexts`.

    python -m proof contexts                 8k, 16k and 32k tokens, `lossless` and a format of each method
    python -m proof contexts --formats kitty2 --context 16384
    python -m proof contexts --report FILE   the table goes to FILE, a page of docs/results

Exits with 1 on a mismatch, after printing a case for `python -m proof fuzz --replay FILE`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from proof.contexts.cases import ANSWER, LENGTHS, LONG_ANSWER, cases
from proof.fuzz.listed import Judged, judge_listed
from proof.fuzz.main import default
from vllm_kvq.cli.arguments import words
from vllm_kvq.formats import FORMATS

SHORTEST = 2048
"""Enough for the long answer, and for a hit's own end after three quarters of the prompt."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof contexts",
        description="Long contexts on real engines, every token judged.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--formats", type=words(sorted(FORMATS)), default=default(), metavar="FORMAT,...")
    usual = f"maximum tokens of each prompt (default: {','.join(map(str, LENGTHS))})"
    parser.add_argument("--context", type=lengths, default=LENGTHS, metavar="TOKENS,...", help=usual)
    text = "tokens per page (default: %(default)s)"
    parser.add_argument("--block-size", type=int, default=64, metavar="N", help=text)
    text = "concurrent engines, each taking gigabytes (default: %(default)s)"
    parser.add_argument("--jobs", type=int, default=1, help=text)
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for processor, command and table")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error("--jobs must be positive")
    try:
        listed = [one for name in options.formats for one in cases(name, options.block_size, options.context)]
    except ValueError as error:
        parser.error(f"--block-size {options.block_size}: {error}")
    found = judge_listed(listed, options.jobs)
    if options.report:
        options.report.write_text(page(options, found), encoding="utf-8")
    return found.say()


def lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < SHORTEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths from {SHORTEST} on; write 8192,16384")
    return found


def page(options: argparse.Namespace, found: Judged) -> str:
    command = f"python -m proof contexts --formats {','.join(options.formats)}"
    if options.context != LENGTHS:
        command += f" --context {','.join(map(str, options.context))}"
    if options.block_size != 64:
        command += f" --block-size {options.block_size}"
    *rest, last = (f"{n:,}" for n in options.context)
    several = f"{', '.join(rest)} and {last}" if rest else last
    return f"""# Long contexts

Prompts of nearly {several} tokens in chunks, each next to a short prompt with
an answer of {LONG_ANSWER} tokens; then prefix hits of three quarters and of the whole; answers of {ANSWER} tokens.
Every second engine has drafts, and blocks that lie apart in a pool beyond 4 GiB. Every token of an answer is judged:
`lossless` must give plain vLLM's tokens, the others the reference's (docs/testing.md).

{found.how}

    {command}

{chr(10).join("    " + line for line in found.table.splitlines())}

A *tie* is a token that the reference chooses as well once it is disturbed by what float32 rounds.
"""

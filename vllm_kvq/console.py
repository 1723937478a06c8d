"""What all commands share: help with examples and exit codes, and tables on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from vllm_kvq.meant import SURE, meant

DONE, FOUND, USAGE = 0, 1, 2
"""What commands exit with."""

FORMATS = "--formats"
FORMERLY = {
    "--longest": "--tokens",
    "--behind": "--context",
    "--prompt": "--context",
    "--answer": "--tokens",
    "--concurrency": "--batch",
    "--model": "MODEL",
    "--format": FORMATS,
} | dict.fromkeys(("--csv", "--plot", "--plots", "--folder", "--output"), "--out")
"""Former names of flags, and those that they have instead."""


def parser(prog: str, about: str, examples: Sequence[str], found: str) -> Parser:
    """A command's parser. `found` says what its exit code 1 means; the examples are its arguments, or whole lines."""
    return Parser(
        prog=prog,
        description=about,
        epilog=help_end([f"{prog} {example}".rstrip() for example in examples], found),
        formatter_class=Help,
        allow_abbrev=False,
    )


class Help(argparse.RawDescriptionHelpFormatter):
    """Says the default in each option's line."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        said = "default: " in text or not action.option_strings or action.nargs == 0 or action.default is None
        return text if said else f"{text} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Folds paragraphs as a whole, and indented lines by themselves; examples are not folded."""
        lines: list[str] = []
        for line in text.splitlines():
            if lines and line and lines[-1] and not line.startswith(" ") and not lines[-1].startswith(" "):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
        return "\n".join(folded(line, width) if not line.startswith("  vllm") else line for line in lines)


def folded(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()))) if line else ""


class Parser(argparse.ArgumentParser):
    """Wrong usage is one sentence, and a JSON document if the command was asked for one."""

    as_json = False

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        self.as_json = "--json" in given
        return super().parse_known_args(given, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            word = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
            self.error(f"unknown argument {word}; {self._hint(word)}")
        return found

    def _hint(self, word: str) -> str:
        """What to write instead of an argument that is not known."""
        flags = self._option_string_actions
        now = FORMERLY.get(word)
        if now in flags:
            return f"it is {now} here"
        if now is not None and now in [action.metavar for action in self._actions if not action.option_strings]:
            return f"{now} is given without a flag"
        if close := meant(word, flags, SURE):
            return f"did you mean {close}?"
        if not word.startswith("-") and (taken := flags.get(FORMATS)) is not None and callable(taken.type):
            try:
                taken.type(word)
            except argparse.ArgumentTypeError:
                pass
            else:
                return f"did you mean {FORMATS} {word}?"
        return f"see {self.prog} --help"

    def error(self, message: str) -> NoReturn:
        raise SystemExit(fail(self.prog, message, self.as_json, USAGE))


def fail(prog: str, sentence: object, as_json: bool, status: int = FOUND) -> int:
    """Says why a command has no result: a sentence on standard error, or a JSON document. The status is handed back."""
    if as_json:
        what, _, instead = str(sentence).rpartition("; ")
        show_json({"error": what or instead, "instead": instead if what else None})
    else:
        print(f"{prog}: error: {sentence}" if status == USAGE else f"{prog}: {sentence}", file=sys.stderr)
    return status


def help_end(examples: Sequence[str], found: str) -> str:
    lines = "\n".join(f"  {example}" for example in examples)
    codes = ((DONE, "done"), (FOUND, found), (USAGE, "wrong usage"))
    return f"examples:\n{lines}\n\nexit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in codes)


def add_json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="print one JSON document instead")


GAP = 2
"""Blanks between a table's columns."""


@dataclass(frozen=True)
class Table:
    """Cells as text. Columns from number `right` on are aligned to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: int = 1
    title: str = ""
    indent: int = 0

    def __post_init__(self) -> None:
        if any(len(row) != len(self.head) for row in self.rows):
            raise ValueError(f"a row does not have the {len(self.head)} cells of the table's head")

    def plain(self) -> str:
        """Columns two spaces apart. A head may have several lines, the same number in each column."""
        heads = list(zip(*(head.split("\n") for head in self.head), strict=True)) if any(self.head) else []
        lines = [*heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pad = " " * self.indent
        text = [self.title] * bool(self.title)
        for line in lines:
            cells = (
                cell.rjust(width) if i >= self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            text.append((pad + (" " * GAP).join(cells)).rstrip())
        return "\n".join(text)

    def show(self) -> None:
        if not sys.stdout.isatty():
            print(self.plain(), flush=True)
            return
        import rich.box
        import rich.console
        import rich.table
        import rich.text

        drawn = rich.table.Table(
            box=rich.box.SIMPLE_HEAD,
            title=rich.text.Text(self.title) if self.title else None,
            title_justify="left",
            show_header=any(self.head),
            show_edge=False,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        there = rich.console.Console().width
        widths = self.widths(there)
        for i, (head, width) in enumerate(zip(self.head, widths, strict=True)):
            justify: Literal["left", "right"] = "right" if i >= self.right else "left"
            drawn.add_column(rich.text.Text(head), justify=justify, width=width, overflow="fold")
        for row in self.rows:
            drawn.add_row(*map(rich.text.Text, row))
        # a terminal that is too narrow for the words themselves folds whole lines
        rich.console.Console(width=max(there, sum(widths) + GAP * (len(widths) - 1))).print(drawn)

    def widths(self, most: int) -> list[int]:
        """The columns' widths in lines of `most` characters: the widest ones are folded at blanks, and no word or
        number is broken. The first column is not folded unless it is one of two."""
        columns = [
            [part for cell in cells for part in cell.split("\n")] for cells in zip(self.head, *self.rows, strict=True)
        ]
        widths = [max(map(len, cells)) for cells in columns]
        least = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
        if len(columns) > 2:
            least[0] = widths[0]
        while sum(widths) + GAP * (len(widths) - 1) > most and widths != least:
            widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
            widths[widest] -= 1
        return widths


def show_json(document: Any) -> None:
    print(json.dumps(document, indent=2), flush=True)


def short(value: float) -> str:
    """Two digits, and no zero before the point."""
    if value < 1e-4:
        return f"{value:.0e}" if value else "0"
    return f"{value:#.2g}".removeprefix("0").removesuffix(".")

"""The commands of a document, as its reader copies them: from its `sh` blocks and its indented ones, one by one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str
    block: str
    """The whole block that it stands in."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, text) of what a shell may be given."""
    for block in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if block.map and (block.type == "code_block" or (block.type, block.info) == ("fence", "sh")):
            yield block.map[0] + 1 + (block.type == "fence"), block.content


def commands(page: str) -> list[Command]:
    """A page's commands; in a block that is not for a shell, whatever bash takes for one."""
    return [Command(page, line + at, text, block) for line, block in blocks(page) for at, text in split(block)]


def split(block: str) -> list[tuple[int, str]]:
    """(number of lines before it, command) of each; bash itself says where one ends."""
    found, begun, lines = [], 0, block.splitlines()
    for number in range(len(lines)):
        text = "\n".join(lines[begun : number + 1])
        if complete(text):
            found += [(begun, text)] if text.strip() else []
            begun = number + 1
    rest = "\n".join(lines[begun:])
    return [*found, (begun, rest)] if rest.strip() else found


def complete(text: str) -> bool:
    """A here-document that is still open stops at the end of the input, which bash only warns about."""
    if text.endswith("\\"):
        return False
    done = subprocess.run(["bash", "-n"], input=text + "\n", capture_output=True, text=True)
    return done.returncode == 0 and not done.stderr

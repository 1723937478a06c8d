"""A fault: an edit of one file, and the tests that must fail under it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class Stale(Exception):
    """The sources have changed and the fault no longer applies: it must be rewritten."""


@dataclass(frozen=True)
class Fault:
    name: str
    """A few words on what goes wrong."""
    file: str
    before: str
    """Occurs exactly once in the file, and is replaced by `after`."""
    after: str
    tests: str
    """Arguments of pytest."""
    slow: bool = False
    """Takes more than a minute (compiles C++, starts engines): planted only with --all."""

    def __post_init__(self) -> None:
        if self.before == self.after or not self.before or not self.tests:
            raise ValueError(f"fault {self.name!r} changes nothing, or names no tests")

    def apply(self, root: Path) -> str:
        """Plant it in the tree at `root`; returns the file's text as it was."""
        path = root / self.file
        if not path.is_file():
            raise Stale(f"{self.file} does not exist")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.before)) != 1:
            raise Stale(f"{self.file} has the text to replace {count} times")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")
        return text

"""Measurements on a GPU, kept between runs: a CSV that grows by a row per measurement, and a page generated from it.

A GPU may be available only for minutes: an interrupted run loses nothing, and the next one measures what is left.
"""

from __future__ import annotations

import csv
import math
import re
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch


@dataclass(frozen=True)
class Measured:
    torch: str
    what: str
    """A format, a competitor, or the copy that gives the bandwidth."""
    batch: int
    context: int
    seconds: float
    read: int
    """Bytes."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"{self.what} took {self.seconds} seconds")

    @classmethod
    def of(cls, row: list[str]) -> Measured:
        version, what, batch, context, seconds, read = row
        return cls(version, what, int(batch), int(context), float(seconds), int(read))


def read(path: Path) -> list[Measured]:
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        return [Measured.of(row) for row in rows[1:]]
    except ValueError as error:
        raise ValueError(f"{path} holds no results ({error}); move it away to start over") from error


def say(line: str) -> None:
    print(line, flush=True)


class NoTime(Exception):
    """The deadline has passed, so nothing more is measured."""


class Results:
    """The results of one device. Without a folder nothing is kept, and after `deadline` nothing is measured."""

    def __init__(
        self, folder: Path | None, device: str, *, deadline: float = math.inf, say: Callable[[str], None] = say
    ) -> None:
        self.device, self.deadline, self.say = device, deadline, say
        self.lines, self.notes = list[str](), list[str]()
        self.late = False
        """Whether the deadline has refused a measurement."""
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        self.path = folder / f"gpu-{name}.csv" if folder else None
        self.rows: dict[tuple[str, int, int], Measured] = {}
        for row in self._written():
            if row.torch == torch.__version__:
                self.rows[row.what, row.batch, row.context] = row

    def _written(self) -> list[Measured]:
        if self.path is None or not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a run was interrupted while it wrote a line
            self.path.write_text(whole, encoding="utf-8")
        return read(self.path)

    def known(self, what: str, batch: int, context: int) -> Measured | None:
        return self.rows.get((what, batch, context))

    def take(self, what: str, batch: int, context: int, measure: Callable[[], tuple[float, int]]) -> Measured:
        """The earlier measurement, or a new one by `measure() -> (seconds, bytes read)`. NoTime after the deadline."""
        found = self.known(what, batch, context)
        if found is None:
            if time.monotonic() >= self.deadline:
                self.late = True
                raise NoTime
            found = Measured(torch.__version__, what, batch, context, *measure())
            self.rows[what, batch, context] = found
            self._append(found)
        return found

    def _append(self, row: Measured) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begun = self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not begun:
                writer.writerow([f.name for f in fields(Measured)])
            writer.writerow(astuple(row))

    def tell(self, line: str) -> None:
        """Says a line, which also appears on the page."""
        self.say(line)
        self.lines.append(line)
        if self.path is None:
            return
        text = "\n".join(f"    {x}" if x else "" for x in self.lines)
        by = f"Written by `vllm-kvq bench gpu`; the numbers: `{self.path.name}`."
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_suffix(".md").write_text(
            f"# Decode times on {self.device}\n\n{by}\n\n{text}\n", encoding="utf-8"
        )

    def note(self, line: str) -> None:
        """Tells what is not in the rows: why something was not measured."""
        self.notes.append(line)
        self.tell(line)

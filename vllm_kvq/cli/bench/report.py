"""What a benchmark leaves in the folder of `--out`: report.html, the numbers as CSV, and its plot as PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvq.bench.figures import write_csv
from vllm_kvq.cli.page.document import Page, Section
from vllm_kvq.cli.page.made import command
from vllm_kvq.cli.page.plots import IF_INSTALLED, NO_PLOT, Drawn, pictures
from vllm_kvq.console import Table
from vllm_kvq.drawing import Picture


@dataclass(frozen=True)
class Report:
    """What is the same in all reports of a command."""

    prog: str
    file: str
    """The name of the CSV and the PNG, without an ending."""
    about: str
    """A sentence on what is measured."""
    heading: str
    """What the plot shows."""
    columns: Sequence[str] = ()
    """Sentences on what the tables' columns mean."""

    @property
    def files(self) -> str:
        """What the help of `--out` says."""
        return f"report.html, {self.file}.csv, and {self.file}.png {IF_INSTALLED}"

    def page(
        self,
        drawn: Drawn,
        tables: Sequence[Table],
        notes: Sequence[str],
        line: str,
        facts: Sequence[tuple[str, str]],
        of: str = "",
    ) -> Page:
        """`line` is the command line, and `of` the model or device that the title names."""
        sections = (
            Section(self.heading, [NO_PLOT] if drawn is None else drawn),
            Section("Tables", [*self.columns, *tables] if tables else []),
            Section("Notes", notes),
        )
        return Page(f"{self.prog}: {of}" if of else self.prog, self.about, line, facts, sections)

    def write(
        self,
        folder: Path,
        records: Sequence[Mapping[str, Any]],
        draw: Callable[[Path], Picture],
        tables: Sequence[Table],
        notes: Sequence[str],
        arguments: Sequence[str] | None,
        facts: Sequence[tuple[str, str]],
        of: str = "",
    ) -> None:
        """All files of a command that measures one thing; `arguments` are the command's own."""
        write_csv(folder / f"{self.file}.csv", records)
        drawn = pictures(lambda: [draw(folder / f"{self.file}.png")])
        self.page(drawn, tables, notes, command(self.prog, arguments), facts, of).write(folder)

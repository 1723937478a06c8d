"""An evaluation's results as a page: plots, tables, and the tokens that were hurt most."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kvq.cli.eval.hurt import FIGURES, around, figures
from vllm_kvq.cli.page.document import Page, Section
from vllm_kvq.cli.page.tree import Quoting
from vllm_kvq.console import Table
from vllm_kvq.drawing import Picture
from vllm_kvq.eval.results import report
from vllm_kvq.eval.results.result import ALL, Hurt, Results, Row

ABOUT = "Each format's answers next to those with the 16-bit cache, on the same texts."
NO_PLOTS = "There are no plots: they need matplotlib (pip install 'vllm-kvq[bench]')."
FRONTIER = "frontier"
"""How the names of files that show quality against bits begin."""


def page(
    results: Results, drawn: Sequence[Picture] | None, command: str, most: int, facts: Sequence[tuple[str, str]] = ()
) -> Page:
    """`drawn` is None if plots can't be drawn here, `most` the number of hurt tokens of a format in a table."""
    models = ", ".join(dict.fromkeys(row.model for row in results.rows))
    first = [picture for picture in drawn or () if picture.path.name.startswith(FRONTIER)]
    others = [picture for picture in drawn or () if picture not in first]
    sections = (
        Section("Quality against bits", [NO_PLOTS] if drawn is None else first),
        Section("Tables", report.tables(results)),
        Section("Errors along continuations", report.position_tables(results)),
        Section("Curves", others),
        Section("Tokens that were hurt most", hurt_quotes(results.rows, most)),
        Section("Notes", [" ".join(note.split("\n")) for note in report.notes(results)]),
    )
    return Page(f"vllm-kvq eval: {models}", ABOUT, command, [*facts, ("model", models)], sections)


def hurt_quotes(rows: Sequence[Row], most: int) -> list[Quoting]:
    """A table for each regime, task and length, with the tokens of all formats."""
    found: dict[tuple[str, str, int], list[tuple[str, Hurt]]] = {}
    for row in rows:
        of = found.setdefault((row.regime, row.task, row.context), [])
        of += [(row.label, hurt) for hurt in row.hurt[:most]]
    return [_quotes(*about, hurt) for about, hurt in found.items() if hurt]


def _quotes(regime: str, task: str, context: int, found: Sequence[tuple[str, Hurt]]) -> Quoting:
    title = f"{'all tasks' if task == ALL else task}, {context} tokens, {regime}"
    cells = [[label, "".join(around(hurt)), *figures(hurt)] for label, hurt in found]
    return Quoting(Table(["format", "text", *FIGURES], cells, 2, title), 1, [around(hurt) for _, hurt in found])

"""`vllm-kvq eval show RESULTS`: an evaluation's tables, the tokens that were hurt most, and plots."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.cli.arguments import add_out, from_zero
from vllm_kvq.cli.eval.arguments import add_baseline
from vllm_kvq.eval.results import plots, report
from vllm_kvq.eval.results.result import Hurt, Results, Row
from vllm_kvq.eval.results.statistics import claims

PROG = "vllm-kvq eval show"

AROUND = 32
"""The number of characters shown before and after a token."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Shows what `vllm-kvq eval MODEL --out DIR` has written: tables, the tokens that were hurt most, plots.",
        ("results/results.json", "results/results.json --hurt 3 --out results"),
        "there are no results, or plots can't be drawn",
    )
    p.add_argument("results", type=Path, metavar="RESULTS", help="results.json file")
    p.add_argument("--hurt", type=from_zero, default=5, metavar="N", help="number of hurt tokens per format and task")
    add_baseline(p, "as in the results")
    add_out(p, "plots, PNG files named after what they show (needs matplotlib)")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        results = Results.load(args.results)
        if args.baseline or not results.claims:
            results = replace(results, claims=claims(results.rows, args.baseline))
        drawn = plots.draw_all(results.rows, args.out) if args.out else []
    except (ValueError, OSError) as error:
        return console.fail(PROG, error, args.json)
    if args.json:
        console.show_json(results.document())
        return console.DONE
    report.show(results)
    for table in hurt_tables(results.rows, args.hurt):
        print()
        table.show()
    for path in drawn:
        print(path)
    return console.DONE


def hurt_tables(rows: Iterable[Row], most: int) -> list[console.Table]:
    """A table for each row that lists tokens: each token in its text, in brackets."""
    head = ["text", "position", "KL", "p in 16 bits", "p"]
    return [
        console.Table(head, [_cells(h) for h in row.hurt[:most]], title=_title(row))
        for row in rows
        if row.hurt and most > 0
    ]


def _title(row: Row) -> str:
    return f"{row.label}, {row.task}, {row.context} tokens, {row.regime}: the tokens that were hurt most"


def _cells(hurt: Hurt) -> list[str]:
    text = f"{_line(hurt.before)[-AROUND:]}[{_line(hurt.token)}]{_line(hurt.after)[:AROUND]}"
    return [text, str(hurt.position), f"{hurt.kl:.3g}", f"{hurt.probability_bf16:.3f}", f"{hurt.probability:.3f}"]


def _line(text: str) -> str:
    """Line ends and tabs as escapes."""
    return text.encode("unicode_escape").decode() if not text.isprintable() else text

"""`vllm-kvq eval show RESULTS`: an evaluation's tables, the tokens that were hurt most, and plots."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.cli.arguments import add_out, check_file, from_zero
from vllm_kvq.cli.eval.arguments import add_baseline
from vllm_kvq.cli.eval.hurt import MOST, hurt_tables
from vllm_kvq.cli.eval.page import page
from vllm_kvq.cli.page.made import NOT_MEASURED, command
from vllm_kvq.eval.results import plots, report
from vllm_kvq.eval.results.result import Results
from vllm_kvq.eval.results.statistics import claims

PROG = "vllm-kvq eval show"


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Shows what `vllm-kvq eval MODEL --out DIR` has written: tables, the worst tokens, plots.",
        ("results/results.json", "results/results.json --hurt 3 --out results"),
        "there are no results, or plots can't be drawn",
    )
    p.add_argument("results", type=Path, metavar="RESULTS", help="results.json file")
    text = "number of worst tokens to show per format and task"
    p.add_argument("--hurt", type=from_zero, default=MOST, metavar="N", help=text)
    add_baseline(p, "as in the results")
    add_out(p, "report.html, and plots, PNG files named after what they show (needs matplotlib)")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    check_file(p, args.results, "a results.json of vllm-kvq eval MODEL --out")
    try:
        results = Results.load(args.results)
        if args.baseline or not results.claims:
            results = replace(results, claims=claims(results.rows, args.baseline))
        files = []
        if args.out:
            drawn = plots.draw_all(results.rows, args.out)
            facts = [("results", f"{args.results}; {NOT_MEASURED}")]
            made = page(results, drawn, command(PROG, arguments), args.hurt, facts)
            files = [made.write(args.out), *(picture.path for picture in drawn)]
    except (ValueError, OSError) as error:
        return console.fail(PROG, error, args.json)
    if args.json:
        console.show_json(results.document())
        return console.DONE
    report.show(results)
    for table in hurt_tables(results.rows, args.hurt):
        print()
        table.show()
    for path in files:
        print(path)
    return console.DONE

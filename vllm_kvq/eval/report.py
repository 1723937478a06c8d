"""Results on a terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from vllm_kvq.console import Table
from vllm_kvq.eval.result import ALL, DECODING, HITS, METRICS, READING, TEACHER_FORCED, Estimate, Results, Row

ABOUT = ("model", "label", "task", "regime", "context", "sequences", "seed", "bits", "kl_is_bound", "problem")
SHARES = ("top1", "accuracy", "exact")
"""Metrics that are shares of one; printed as percentages."""
GENERATED = ("kl", "kl_p99", "kl_p999", "top1", "exact", "agreement", "score")
COLUMNS = {
    READING: ("kl", "kl_median", "kl_p99", "kl_p999", "top1", "perplexity", "accuracy"),
    TEACHER_FORCED: (
        "kl",
        "kl_median",
        "kl_p99",
        "kl_p999",
        "top1",
        "perplexity",
        "dp_mean",
        "dp_rms",
        "accuracy",
        "score",
    ),
    DECODING: GENERATED,
    HITS: GENERATED,
}
HEADS = {
    "kl": "KL",
    "kl_median": "KL median",
    "kl_p90": "KL 90 %",
    "kl_p99": "KL 99 %",
    "kl_p999": "KL 99.9 %",
    "top1": "same top 1, %",
    "perplexity": "perplexity",
    "dp_mean": "Δp mean",
    "dp_rms": "Δp RMS",
    "accuracy": "right, %",
    "exact": "exact, %",
    "agreement": "tokens agreed",
    "score": "score",
}
TITLES = {
    TEACHER_FORCED: "teacher-forced: what each token of a text is given, the cache read in small chunks",
    READING: "reading: the last tokens of each text read the cache of those before, as a decode step would",
    DECODING: "decoding: what the format generates itself",
    HITS: "hits: what the format generates itself, its prompt found in the prefix cache",
}
BOUND = "KL is a lower bound: the most probable tokens are compared one by one, all others as one."
NOTE = "[ ]: 95 % confidence interval over sequences (bootstrap). bits: per cached number at that length, all counted."


def tables(results: Results) -> list[Table]:
    """One for each regime, task and length."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in results.rows:
        found.setdefault((row.regime, row.task, row.context), []).append(row)
    return [_table(*about, rows) for about, rows in found.items()]


def _table(regime: str, task: str, context: int, rows: list[Row]) -> Table:
    names = [name for name in COLUMNS[regime] if any(name in row.metrics for row in rows)]
    cells = [[row.label, bits(row), *(cell(name, row.metrics.get(name)) for name in names)] for row in rows]
    count = max(row.sequences for row in rows)
    title = f"{'all tasks' if task == ALL else task}, {context} tokens, {count} sequences; {TITLES[regime]}"
    return Table(["format", "bits", *(HEADS[name] for name in names)], cells, title=title)


def bits(row: Row) -> str:
    return "-" if row.bits is None else f"{row.bits:.2f}"


def cell(name: str, estimate: Estimate | None) -> str:
    """A figure with its interval."""
    if estimate is None:
        return "-"
    if math.isnan(estimate.low):
        return number(name, estimate.value)
    return f"{number(name, estimate.value)} [{number(name, estimate.low, 2)}, {number(name, estimate.high, 2)}]"


def number(name: str, value: float, digits: int = 3) -> str:
    """Shares as percentages."""
    if name in SHARES:
        return f"{100 * value:.1f}"
    return f"{value:.1f}" if name == "agreement" else f"{value:.{digits}g}"


def show(results: Results) -> None:
    for table in tables(results):
        table.show()
        print()
    for label, problem in dict.fromkeys((r.label, r.problem) for r in results.rows if r.problem):
        print(f"{label}: {problem}")
    print(NOTE)
    if any(row.kl_is_bound for row in results.rows):
        print(BOUND)


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """A row for each row, a column for each metric and for each bound of its interval."""
    metrics = [f"{name}{end}" for name in METRICS for end in ("", "_low", "_high")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*ABOUT, *metrics])
        writer.writeheader()
        for row in rows:
            about = {name: getattr(row, name) for name in ABOUT}
            figures = {
                f"{name}{end}": value
                for name, e in row.metrics.items()
                for end, value in (("", e.value), ("_low", e.low), ("_high", e.high))
                if not math.isnan(value)
            }
            writer.writerow(about | figures)

"""Results on a terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_kvq.console import Table
from vllm_kvq.eval.choice import FP8
from vllm_kvq.eval.results.result import (
    ALL,
    DECODING,
    HITS,
    METRICS,
    READING,
    TEACHER_FORCED,
    Claim,
    Estimate,
    Results,
    Row,
)
from vllm_kvq.formats.table import PLAIN

ABOUT: tuple[str, ...] = ("model", "label", "task", "regime", "context", "sequences", "seed")
ABOUT += ("page_bits", "bits", "kl_is_bound", "problem")
SHARES = ("top1", "accuracy", "exact")
"""Metrics that are fractions, printed as percentages."""
GENERATED = ("kl", "kl_forced", "kl_p99", "kl_p999", "top1", "exact", "agreement", "score")
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
    "kl_forced": "KL forced",
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
NOTE = (
    "[ ]: 95 % confidence interval over sequences (bootstrap). pages, bits: per cached number in packed pages, and of\n"
    "all that a request of that length holds."
)
CLAIMS = (
    "KL / baseline: compared text by text; [ ] is adjusted for all comparisons of its table (Holm, 5 %), and where it "
    "holds 1\nnothing is said. right: McNemar's exact test, adjusted likewise."
)
ARITHMETIC = (
    "fp8: float8_e4m3fn with scale 1 on every cached number, as arithmetic; a server's kernels may add to that."
)


def tables(results: Results) -> list[Table]:
    """One table for each regime, task and length."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in results.rows:
        found.setdefault((row.regime, row.task, row.context), []).append(row)
    return [_table(*about, rows, results.claims) for about, rows in found.items()]


def _table(regime: str, task: str, context: int, rows: list[Row], claims: Sequence[Claim]) -> Table:
    names = [name for name in COLUMNS[regime] if any(name in row.metrics for row in rows)]
    cells = [
        [row.label, bits(row.page_bits), bits(row.bits), *(cell(name, row.metrics.get(name)) for name in names)]
        for row in rows
    ]
    count = max(row.sequences for row in rows)
    title = f"{'all tasks' if task == ALL else task}, {context} tokens, {count} sequences; {TITLES[regime]}"
    head = ["format", "pages", "bits", *(HEADS[name] for name in names)]
    for metric in ("kl", "right"):
        mine = {c.label: c for row in rows for c in claims_of(row, claims) if c.metric == metric}
        if mine:
            head.append(f"{'KL' if metric == 'kl' else 'right'} / {next(iter(mine.values())).baseline}")
            cells = [[*line, compared(mine.get(row.label))] for line, row in zip(cells, rows, strict=True)]
    return Table(head, cells, title=title)


def claims_of(row: Row, claims: Iterable[Claim]) -> list[Claim]:
    about = row.label, row.regime, row.task, row.context
    return [c for c in claims if (c.label, c.regime, c.task, c.context) == about]


def compared(claim: Claim | None) -> str:
    if claim is None:
        return "-"
    if claim.metric == "kl":
        text = interval(claim.value, claim.low, claim.high)
    else:
        text = f"{100 * claim.value:+.1f} points, p {claim.p:.2g}"
    return f"{text} {claim.verdict}" if claim.verdict else text


def position_tables(results: Results) -> list[Table]:
    """Tables of generated continuations: does a format's error grow along them?"""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in results.rows:
        if "kl_forced" in row.by_position:
            found.setdefault((row.regime, row.task, row.context), []).append(row)
    return [_position_table(*about, rows) for about, rows in found.items()]


def _position_table(regime: str, task: str, context: int, rows: list[Row]) -> Table:
    bins = rows[0].by_position["kl_forced"]
    head = ["format", "KL along", *(f"{b.begin:.0f} to {b.end:.0f}" for b in bins)]
    cells = [
        [row.label, along, *(cell("kl", b.estimate) for b in row.by_position[name])]
        for row in rows
        for name, along in (("kl", "its own text"), ("kl_forced", "bf16's text"))
    ]
    title = f"{'all tasks' if task == ALL else task}, {context} tokens; {regime}: KL by tokens generated before"
    return Table(head, cells, right=2, title=title)


SURE = 0.95
"""The smallest share of right answers with the 16-bit cache for a table to say anything about formats."""


def sureness(results: Results) -> list[str]:
    """How often the 16-bit cache itself is right: no format can lose what it can't do."""
    lines = []
    for row in results.rows:
        for name in ("accuracy", "exact"):
            if row.format != PLAIN or name not in row.metrics:
                continue
            share = row.metrics[name].value
            counts = [sum(b.count for b in curves[name]) for curves in (row.by_depth, row.by_steps) if name in curves]
            of = f" of {max(counts)} answers" if counts else ""
            where = f"{'all tasks' if row.task == ALL else row.task}, {row.context} tokens, {row.regime}"
            claim = "" if share >= SURE else f"; less than {100 * SURE:.0f} %, so nothing is claimed from this table"
            lines.append(f"{where}: bf16 is right in {100 * share:.1f} %{of}{claim}")
    return lines


def bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def cell(name: str, estimate: Estimate | None) -> str:
    """A figure with its interval."""
    if estimate is None:
        return "-"
    factor = 100 if name in SHARES else 1
    return interval(*(factor * x for x in (estimate.value, estimate.low, estimate.high)))


def interval(value: float, low: float, high: float) -> str:
    """No digits beyond the first significant one of a quarter of the interval; three without an interval."""
    half = (high - low) / 2
    if not (math.isfinite(half) and half > 0):
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(half / 2)))
    text, *ends = (f"{x:.{decimals}f}" for x in (value, low, high))
    return f"{text} [{', '.join(ends)}]"


def notes(results: Results) -> list[str]:
    """What is said below the tables."""
    lines = sureness(results)
    problems = dict.fromkeys((r.label, r.problem) for r in results.rows if r.problem)
    lines += [f"{label}: {problem}" for label, problem in problems]
    lines.append(NOTE)
    if results.claims:
        lines.append(CLAIMS)
    if any(row.regime == READING and row.format == FP8 for row in results.rows):
        lines.append(ARITHMETIC)
    if any(row.kl_is_bound for row in results.rows):
        lines.append(BOUND)
    return lines


def show(results: Results) -> None:
    for table in (*tables(results), *position_tables(results)):
        table.show()
        print()
    print(*notes(results), sep="\n")


CLAIMED = ("baseline", "texts", "value", "low", "high", "p", "level", "verdict")


def write_csv(path: Path, results: Results) -> None:
    """A line for each row, with columns for each metric, for each bound of its interval, and for claims."""
    metrics = [f"{name}{end}" for name in METRICS for end in ("", "_low", "_high")]
    claimed = [f"{metric}_{name}" for metric in ("kl", "right") for name in CLAIMED]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*ABOUT, *metrics, *(f"claim_{name}" for name in claimed)])
        writer.writeheader()
        for row in results.rows:
            about = {name: getattr(row, name) for name in ABOUT}
            figures = {
                f"{name}{end}": value
                for name, e in row.metrics.items()
                for end, value in (("", e.value), ("_low", e.low), ("_high", e.high))
                if not math.isnan(value)
            }
            claims = {
                f"claim_{c.metric}_{name}": value
                for c in claims_of(row, results.claims)
                for name, value in c.document().items()
                if name in CLAIMED
            }
            writer.writerow(about | figures | claims)

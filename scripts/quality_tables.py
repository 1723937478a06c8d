"""The tables of docs/quality.md, peers.md and regression.md, and one of papers.md, from docs/results/quality.

python scripts/quality_tables.py
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_kvq.console import short
from vllm_kvq.eval.results.statistics import mcnemar
from vllm_kvq.formats.table import PLAIN

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "quality"
MODELS = ("outliers", "demo")
"""The demo model with key biases and wide channels written into it, and as it is."""
REAL = "real-*.csv"
"""One file for each pretrained model and length: `vllm-kvq eval MODEL --quick --out DIR` writes it as results.csv."""
Row = dict[str, str]


@dataclass(frozen=True)
class Column:
    """One metric of one task, of each model."""

    title: str
    task: str
    metric: str
    percent: bool = False

    def cell(self, row: Row) -> str:
        value = float(row[self.metric])
        return f"{100 * value:.1f}" if self.percent else short(value)


@dataclass(frozen=True)
class Results:
    """Files MODEL-NAME.csv, and what their table shows."""

    name: str
    columns: tuple[Column, ...]


GIVEN = (
    Column("KL text", "text", "kl"),
    Column("99.9 %", "text", "kl_p999"),
    Column("KL recall", "recall", "kl"),
    Column("99.9 %", "recall", "kl_p999"),
    Column("right, %", "recall", "accuracy", percent=True),
)
GENERATED = (
    Column("KL text", "text", "kl"),
    Column("99.9 %", "text", "kl_p999"),
    Column("same top 1, %", "text", "top1", percent=True),
    Column("KL sums", "arithmetic", "kl"),
    Column("sums right, %", "arithmetic", "exact", percent=True),
)
TABLES = (
    Results("4096", GIVEN),
    Results("2048", GIVEN),
    Results("generated", GENERATED),
    Results("hits", GENERATED[:3]),
)


def table(results: Results) -> Iterator[str]:
    """A row for each format, the smallest first; its bits are the same in both models."""
    rows = {model: _read(model, results.name) for model in MODELS}
    hard, demo = MODELS
    head = [column.title for column in results.columns]
    yield _line(["format", "bits", *head, *(f"{demo}: {title}" for title in head)])
    yield _line(["---"] * (2 + 2 * len(head)))
    labels = {label: float(row["bits"]) for (label, _), row in rows[hard].items()}
    for label, bits in sorted(labels.items(), key=lambda pair: pair[1]):
        cells = [c.cell(rows[model][label, c.task]) for model in MODELS for c in results.columns]
        yield _line(["bf16" if label == PLAIN else f"`{label.replace(',', ', ')}`", f"{bits:.2f}", *cells])


def real(path: Path) -> Iterator[str]:
    """A row for each format, in the order in which they were given; the last column is against the table's baseline."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    baseline = next(row["claim_kl_baseline"] for row in rows if row["claim_kl_baseline"])
    yield _line(["format", "pages", "bits", "KL", "same top 1, %", f"KL / {baseline}"])
    yield _line(["---"] * 6)
    for row in rows:
        label = f"`{row['label'].replace(',', ', ')}`"
        if row["label"] == PLAIN:
            label = "bf16" if float(row["page_bits"]) == 16 else "float32"
        kl = f"{_short(row['kl'])} [{_short(row['kl_low'])}, {_short(row['kl_high'])}]" if float(row["kl"]) else "0"
        ratio = "-"
        if row["claim_kl_value"]:
            bounds = f"[{_short(row['claim_kl_low'])}, {_short(row['claim_kl_high'])}]"
            ratio = f"{_short(row['claim_kl_value'])} {bounds} {row['claim_kl_verdict']}".strip()
        bits = [f"{float(row[name]):.2f}" for name in ("page_bits", "bits")]
        yield _line([label, *bits, kl, f"{100 * float(row['top1']):.0f}", ratio])


PAPERS = (
    ("SQuat", "squat4", "kivi4"),
    ("SQuat on top of Kitty's keys", "squat2", "kitty2"),
    ("Kitty", "kitty2", "kivi2"),
    ("PolarQuant", "polar4", "kivi4"),
    ("InnerQ", "innerq2", "kivi2"),
    ("QJL", "qjl3", "kivi2"),
    ("KVarN", "kvarn_k4v2", "kitty2"),
    ("TurboQuant", "turbo4", "kivi4"),
    ("OSCAR", "oscar2", "kivi2"),
)
"""A paper, its format, and the format of ours next to it in bits."""
BOTH_KINDS = {"smollm2-135m": "SmolLM2-135M", "qwen2.5-0.5b": "Qwen2.5-0.5B", "qwen2.5-1.5b": "Qwen2.5-1.5B"}
"""Models without and with key biases, on which all of these were measured."""


def papers(context: int = 1024) -> Iterator[str]:
    """docs/papers.md: how each method does on real models, next to one that is simpler."""
    rows = {model: _real(model, context) for model in BOTH_KINDS}
    heads = [f"{name}: KL" for name in BOTH_KINDS.values()]
    yield _line(["method", "format", "bits", "compared with", "bits", *heads])
    yield _line(["---"] * (5 + len(heads)))
    for paper, fmt, other in PAPERS:
        bits = [f"{float(rows['qwen2.5-1.5b'][name]['page_bits']):.2f}" for name in (fmt, other)]
        cells = [f"{_short(found[fmt]['kl'])} / {_short(found[other]['kl'])}" for found in rows.values()]
        yield _line([paper, f"`{fmt}`", bits[0], f"`{other}`", bits[1], *cells])


def humaneval(path: Path) -> Iterator[str]:
    """How many problems each format solves, and whether that differs from the 16-bit cache by more than chance."""
    answers: dict[str, list[Row]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            answers.setdefault(row["format"], []).append(row)
    right = {label: [row["passed"] == "True" for row in rows] for label, rows in answers.items()}
    yield _line(["format", "solved", "pass@1, %", "only bf16", "only this", "p", "same answers"])
    yield _line(["---"] * 7)
    for label, solved in right.items():
        if label == PLAIN:
            yield _line(["bf16", f"{sum(solved)} of {len(solved)}", f"{100 * sum(solved) / len(solved):.1f}", *"----"])
            continue
        pairs = list(zip(solved, right[PLAIN], strict=True))
        counts = [str(sum(b and not a for a, b in pairs)), str(sum(a and not b for a, b in pairs))]
        same = str(sum(a["text"] == b["text"] for a, b in zip(answers[label], answers[PLAIN], strict=True)))
        share, p = 100 * sum(solved) / len(solved), mcnemar(solved, right[PLAIN])
        yield _line([f"`{label}`", f"{sum(solved)} of {len(solved)}", f"{share:.1f}", *counts, f"{p:.2g}", same])


def generated(path: Path) -> Iterator[str]:
    """What each format generates itself, and how closely it follows bf16's text."""
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["label"] != PLAIN]
    yield _line(["format", "bits", "KL", "KL forced", "same top 1, %", "tokens until the texts differ"])
    yield _line(["---"] * 6)
    for row in rows:
        kls = [f"{_short(row[k])} [{_short(row[f'{k}_low'])}, {_short(row[f'{k}_high'])}]" for k in ("kl", "kl_forced")]
        same, until = 100 * float(row["top1"]), float(row["agreement"])
        yield _line([f"`{row['label']}`", f"{float(row['bits']):.2f}", *kls, f"{same:.0f}", f"{until:.0f}"])


def _real(model: str, context: int) -> dict[str, Row]:
    with (FOLDER / f"real-{model}-{context}.csv").open(encoding="utf-8") as file:
        return {row["label"]: row for row in csv.DictReader(file)}


def _short(value: str) -> str:
    return short(float(value))


def _read(model: str, name: str) -> dict[tuple[str, str], Row]:
    with (FOLDER / f"{model}-{name}.csv").open(encoding="utf-8") as file:
        return {(row["label"], row["task"]): row for row in csv.DictReader(file)}


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob(REAL)):
        print(path.stem.removeprefix("real-"), *real(path), "", sep="\n")
    for path in sorted(FOLDER.glob("humaneval-*.csv")):
        print(path.stem, *humaneval(path), "", sep="\n")
    for path in sorted(FOLDER.glob("generated-*.csv")):
        print(path.stem, *generated(path), "", sep="\n")
    print("papers", *papers(), "", sep="\n")
    for results in TABLES:
        print(results.name, *table(results), "", sep="\n")
